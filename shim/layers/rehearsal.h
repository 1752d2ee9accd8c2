// SPDX-License-Identifier: BSD-3-Clause
// rehearsal.h: times the tasks of a layer in the first forward pass.
#pragma once

#include "layers/layer.h"

namespace optfuse {

// Whether this use of a layer, on the CPU, is to be rehearsed.
bool is_rehearsed(const LayerUse &use);
// Runs F, dX and dW some times more, drops what they make, and tells the layer's user. began: when
// the use did, by seconds_now(). The arguments are those of make_tasks().
void rehearse(const LayerUse &use, double began, const at::Tensor &y, const at::Tensor &x,
              const at::Tensor &w, const at::Tensor &bias, const ConvOptions *conv);

} // namespace optfuse
