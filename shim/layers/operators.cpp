// SPDX-License-Identifier: BSD-3-Clause
// operators.cpp: the operators through which Python has dX read other weights.
#include <torch/library.h>

#include "layers/layer.h"

namespace optfuse {
namespace {

// One entry a weight in each list; None: the one that the forward pass saw.
void input_weights(int64_t owner, const std::vector<at::Tensor> &weights,
                   const std::vector<std::optional<at::Tensor>> &instead,
                   const std::vector<std::string> &names) {
    std::vector<at::Tensor> tensors;
    for (const auto &tensor : instead)
        tensors.push_back(tensor.value_or(at::Tensor()));
    set_input_weights(owner, weights, tensors, names);
}

} // namespace
} // namespace optfuse

TORCH_LIBRARY_FRAGMENT(optfuse, m) {
    m.def("set_input_weights(int owner, Tensor[] weights, Tensor?[] instead, str[] names) -> ()",
          optfuse::input_weights);
    m.def("forget_input_weights(int owner) -> ()", optfuse::forget_input_weights);
}
