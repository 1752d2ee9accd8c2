// SPDX-License-Identifier: BSD-3-Clause
// translate.h: a line, or one place of its lists, as an instruction of a program.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "program.h"
#include "recorded/numbered.h"
#include "recorded/tape.h"

namespace optfuse::recorded {

// Where a number comes from when the program runs.
struct Number {
    static constexpr uint32_t kNone = UINT32_MAX;
    double factor = 0.0;       // times the value; without one it is the number
    uint32_t value = kNone;    // of the tape
    uint32_t element = kNone;  // if that is a list

    double in(const std::vector<c10::IValue> &values) const;
    bool operator==(const Number &o) const {
        return factor == o.factor && value == o.value && element == o.element;
    }
};

struct Instruction {
    of_operator operation;
    at::ScalarType dtype;      // of the computation: booleans are 0 and 1
    c10::Device device = c10::kCPU;
    at::ScalarType of_number = at::kLong; // the dtype of a tensor that s or t is read from
    bool is_point = false;     // its tensors have no dimensions
    uint32_t to, from[3] = {}; // numbers of tensors
    size_t n_from = 0;
    Number s, t;
    // The tensors without dimensions that s and t are read from.
    uint32_t read[2];
    size_t n_read = 0;
};

// One or two. place: of its lists. Empty: PyTorch's operator has to run.
std::vector<Instruction> translate(const Line &line, uint32_t place,
                                   const std::vector<c10::IValue> &values,
                                   const Numbered &numbered);

// Whether the kernels have that dtype.
std::optional<of_dtype> dtype_of(at::ScalarType type);

} // namespace optfuse::recorded
