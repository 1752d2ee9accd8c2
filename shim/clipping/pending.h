// SPDX-License-Identifier: BSD-3-Clause
// pending.h: gradients that clipping and unscaling leave to be multiplied, and their norms.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "plan.h"

namespace optfuse {

struct References;

// scale.cpp
struct GradientOf {
    Plan *plan;
    Slot *slot;
    const at::Tensor &grad() const { return slot->param->grad(); }
};
// Multiplies a gradient, when it is next read, by a 0-dim tensor whose value is `number`. norm:
// of the result, NaN if not known. A gradient that can't wait is multiplied at once.
void scale_one(const GradientOf &of, double number, float norm, const at::Tensor &factor);
// All of them; on a GPU the host does not wait for the factor's value.
void scale_all(const std::vector<GradientOf> &of, const at::Tensor &factor);
extern const of_scaling_host scaling_host;

// norm.cpp
// The 2-norms of gradients, of the dtype PyTorch gives them; none if one of the
// gradients can't be read here.
std::optional<at::Tensor> norms(const std::vector<GradientOf> &of);
// scale_one() of all, with their norms, and whether all were finite before; none,
// with nothing changed, if one of them can't be read here or has a factor.
std::optional<bool> unscale(const std::vector<GradientOf> &of, const at::Tensor &factor);
at::Tensor norm_by_our_formula(const at::Tensor &x); // contiguous float32

} // namespace optfuse
