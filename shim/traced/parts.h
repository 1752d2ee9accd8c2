// SPDX-License-Identifier: BSD-3-Clause
// parts.h: programs that are more than a line of elementwise operators: parts that the kernels run
// take turns with calls of PyTorch's own operators, such as a norm and what is made of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "optfuse.h"
#include "program.h"

namespace optfuse {

// The form of a state tensor that is not as its parameter.
struct Form {
    at::ScalarType dtype;
    bool is_of_param; // sizes and strides are the parameter's
    std::vector<int64_t> sizes, strides;
};

// By their places among the state tensors; none: as the parameter.
using Forms = std::array<std::optional<Form>, OF_MAX_STATE>;

// Elementwise operators, over registers of which some are tensors.
struct Segment {
    struct Patch { // a number that is known when the program runs: sign times a 0-dim register
        size_t instruction;
        bool is_second; // t, not s
        size_t from;
        double sign;
    };
    std::vector<of_instruction> code;
    of_program core = {};                  // over `code`
    int64_t memory[OF_REGISTER_TEMPORARY]; // registers of the program that are its own; -1: none
    std::vector<int64_t> makes;            // tensors like the parameter, before it runs
    std::vector<Patch> patches;
};

// An operator by its schema.
struct Call {
    struct Place { // of a tensor among the arguments
        size_t argument;
        int64_t item; // of a list; -1: it is the argument
        size_t from;
    };
    c10::OperatorHandle operation;
    std::vector<c10::IValue> arguments; // undefined tensors at those places
    std::vector<Place> places;
    std::vector<int64_t> results; // registers; -1: nobody needs it
};

// A branch on a value: parts are skipped if it is zero or false. No register: they always are, as
// those of the other branch.
struct Branch {
    int64_t from; // -1: none
    size_t skipped;
};

struct Part {
    std::variant<Segment, Call, Branch> what;
    std::vector<int64_t> frees; // registers that nobody reads any more
};

// As _traced/parts.py writes them. Raises Error if they can't be run.
std::vector<Part> make_parts(const std::vector<std::string> &words,
                             const std::vector<int64_t> &code, const std::vector<double> &numbers,
                             const Forms &forms, int64_t n_registers);

// words: for each form its place among the state tensors, its dtype (c10::ScalarType), the number
// of dimensions, sizes and strides; or -1, if these are the parameter's.
Forms make_forms(const std::vector<int64_t> &words);

// Runs them over the memory of an update; like: its parameter. state: a bit for each state tensor
// that there is; one without elements may have no address. Raises what the operators raise.
void run_parts(of_plan *plan, const std::vector<Part> &parts, const Forms &forms,
               size_t n_registers, unsigned state, const of_inputs &in,
               const c10::TensorImpl *like);

} // namespace optfuse
