// SPDX-License-Identifier: BSD-3-Clause
// compile.h: a schedule, made of the lines of a tape.
#pragma once

#include <vector>

#include "recorded/numbered.h"
#include "recorded/translate.h"

namespace optfuse::recorded {

// Instructions over the same elements, which run as one program.
struct Group {
    struct Patch {
        size_t instruction;
        bool is_second; // t, not s
        Number number;
        bool operator==(const Patch &o) const {
            return instruction == o.instruction && is_second == o.is_second && number == o.number;
        }
    };
    std::vector<of_instruction> code; // as it is before of_program_fuse()
    std::vector<Patch> patches;       // its numbers
    std::vector<uint32_t> memory;     // numbers of the tensors that its first registers are
    std::vector<uint32_t> makes;      // of these, whose memory is allocated before it runs
    unsigned reads, writes;           // of_program
    int64_t numel;
    of_dtype dtype;
    c10::Device device = c10::kCPU;
    bool is_as_before = false; // code and numbers are those of the group that runs before it
    bool waits = false;        // it uses what groups before it write, or writes what they use
};

struct Step {
    bool is_group;
    uint32_t number;            // of a group, or a line that runs as PyTorch's operator
    std::vector<uint32_t> done; // lines all of which has run then
    std::vector<uint32_t> products = {}; // lines that may run as one (products.h), the first among them
    size_t frees = 0;           // bytes that the step has made, and those lines have used last
};

struct Schedule {
    std::vector<uint64_t> words;
    std::vector<Group> groups;
    std::vector<Step> steps;
    size_t instructions = 0; // of all groups that are not as before
};

// Whether a kernel has the registers and the room for it. states: its first register that is no
// tensor in memory.
bool fits_on_gpu(const std::vector<of_instruction> &code, size_t states);

Schedule compile(const std::vector<Line> &lines, const std::vector<c10::IValue> &values,
                 const Numbered &numbered);

} // namespace optfuse::recorded
