// SPDX-License-Identifier: BSD-3-Clause
// programs.h: the programs (kernels/program.h) of an optimizer whose step() is traced.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "program.h"
#include "traced/parts.h"

namespace optfuse {

// Never changed: pending updates share it with the slots that it was given to.
struct Program {
    std::vector<of_instruction> code;
    of_program core = {}; // over `code`; or it has parts
    std::vector<Part> parts;
    Forms forms;
    size_t n_registers = 0; // of the parts
    bool is_of_lines = false; // there is none: the lines of a recorded step() run (recorded/ahead.h)

    bool has_parts() const { return core.by_host; }
    bool writes_gradient() const { return (core.writes >> OF_REGISTER_GRAD & 1u) != 0; }
    unsigned state() const { return (core.reads | core.writes) >> OF_REGISTER_STATE; } // a bit each
};

// code: five numbers for each instruction (operator, to, a, b, c); numbers: two (s, t). Raises
// Error if it can't be run.
std::shared_ptr<const Program> make_program(const std::vector<int64_t> &code,
                                            const std::vector<double> &numbers);
// The same for one with parts, as make_parts() takes them. touches: a bit for each register in
// memory that it reads or writes; writes: for each that it writes.
std::shared_ptr<const Program> make_program(std::vector<Part> parts, Forms forms,
                                            size_t n_registers, unsigned touches, unsigned writes);

} // namespace optfuse
