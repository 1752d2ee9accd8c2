// SPDX-License-Identifier: BSD-3-Clause
// classes.h: the classes of torch::optim that have a fused update, and where each keeps its
// numbers.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

#include "kernels.h"

namespace optfuse {

// A parameter's entry in the optimizer's state. It stays the user's: these point into it.
struct StateEntry {
    at::Tensor *tensors[OF_MAX_STATE]; // in the rule's order
    int64_t *step;                     // or nullptr: the class has no counter
};

struct CxxClass {
    const char *name;
    const char *rule;
    // A class that inherits from it may have a step() of its own.
    bool (*is_exactly)(const torch::optim::Optimizer &optimizer);
    // The options of a group in the rule's order.
    std::vector<double> (*hyper)(const torch::optim::OptimizerOptions &options);
    std::unique_ptr<torch::optim::OptimizerParamState> (*make_entry)();
    StateEntry (*look_into)(torch::optim::OptimizerParamState &entry);
    // The numbers that new state tensors are filled with; defaults: the optimizer's.
    double (*initial)(const torch::optim::OptimizerOptions &defaults);
    // The last release, 2.x, whose fused operator rounds in 16 bits on the CPU as our update, as
    // in _library/releases.py; 0: all do.
    int same_16_bits_up_to;
};

// Throws if there is none.
const CxxClass &class_of(const torch::optim::Optimizer &optimizer);

} // namespace optfuse
