// SPDX-License-Identifier: BSD-3-Clause
// tasks.h: the backward pass of one use of a layer as two nodes of autograd's graph.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "layers/layer.h"

namespace optfuse {

// Makes the two nodes behind y, which was computed below autograd, with the bits of stock's
// one. bias may be undefined. conv: null for a Linear, where x and w have two dimensions.
void make_tasks(const LayerUse &use, const at::Tensor &y, const at::Tensor &x, const at::Tensor &w,
                const at::Tensor &bias, const ConvOptions *conv);

// Numbers of this thread's nodes are from here on above those of tasks that wait.
void leave_room_for_waiting();

} // namespace optfuse
