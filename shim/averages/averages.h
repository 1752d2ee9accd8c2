// SPDX-License-Identifier: BSD-3-Clause
// averages.h: averages of weights, which the launches of the weights' updates write, too.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "optfuse.h"
#include "plan/programs.h"

namespace optfuse {

// One step of an average a of a weight w, each operation rounded to the dtype. The numbers of
// formulas are those of _averages.py.
enum class Formula : int64_t {
    LERP,     // lerp(a, w, take)
    WEIGHTED, // keep * a + take * w
    MEAN,     // a + (w - a) / take
    COUNT
};

struct Averaging {
    Formula formula;
    double keep; // of WEIGHTED alone
    double take;
};

// averages.cpp: makes the next averages of parameters, pair by pair of the same shape and dtype, on
// the CPU: behind the update that is pending on the parameter, or now by PyTorch's operators.
// Returns how many wait; -1, with nothing done: one is not on the CPU, a pair has two dtypes, or
// one that no update is fused in.
int64_t average(const std::vector<at::Tensor> &averages, const std::vector<at::Tensor> &params,
                const Averaging &how);
void average_by_operators(const std::vector<at::Tensor> &averages,
                          const std::vector<at::Tensor> &params, const Averaging &how);
std::shared_ptr<const Program> program_of(const Averaging &how);

// trial.cpp: whether the program has the bits of PyTorch's operators in this dtype on this CPU:
// tried at the first question.
bool is_averaged_alike(const Averaging &how, at::ScalarType dtype);

} // namespace optfuse
