// SPDX-License-Identifier: BSD-3-Clause
// kinds.h: the classes of torch::optim that programs train with, and the reference of each.
#pragma once

#include <torch/torch.h>

#include <memory>
#include <vector>

namespace hazard {

namespace optim = torch::optim;
using Groups = std::vector<optim::OptimizerParamGroup>;
using torch::Tensor;

struct Kind {
    virtual ~Kind() = default;
    // variant: one of a few sets of options.
    virtual std::unique_ptr<optim::OptimizerOptions> options(unsigned variant) const = 0;
    virtual std::unique_ptr<optim::Optimizer> make(Groups groups, unsigned variant) const = 0;
    virtual void change(optim::OptimizerOptions &options, unsigned which, unsigned value) const = 0;
    virtual std::vector<Tensor *> tensors(optim::OptimizerParamState &entry) const = 0;
    // The entry's counter, or nullptr.
    virtual int64_t *step(optim::OptimizerParamState &entry) const = 0;
    // The step() that docs/cxx.md promises, for one parameter that has a gradient.
    virtual void update(optim::Optimizer &optimizer, const optim::OptimizerOptions &options,
                        const Tensor &param) const = 0;
};

const std::vector<std::unique_ptr<Kind>> &kinds();

} // namespace hazard
