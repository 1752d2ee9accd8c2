// SPDX-License-Identifier: BSD-3-Clause
// clip.cpp: what torch.nn.utils does to gradients by many operators, called from Python, in one
// call.
#include <ATen/ops/add.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/stack.h>

#include <cmath>
#include <limits>

#include "clipping/pending.h"
#include "external/native.h"
#include "slots.h"

namespace optfuse {
namespace {

// The gradients that are there, if all are on the CPU, of one dtype, and may be multiplied by our
// kernels; none: of some that is not so. Their plans live as long as *found.
std::vector<GradientOf> gradients_alike(const std::vector<at::Tensor> &params, FoundSlots *found) {
    std::vector<GradientOf> of;
    of_dtype first = OF_DTYPE_COUNT, dtype;
    if (!find_slots(params, found))
        return {};
    for (const FoundSlots::Found &slot : found->slots) {
        const GradientOf g = {slot.plan, slot.param, slot.index};
        if (!g.grad().defined())
            continue;
        if (!can_scale(g.grad(), &dtype) || !g.grad().device().is_cpu())
            return {};
        if (!of.empty() && dtype != first)
            return {};
        first = dtype;
        of.push_back(g);
    }
    return of;
}

at::Tensor norm_of_operators(const std::vector<const at::Tensor *> &all, double norm_type) {
    std::vector<at::Tensor> norms;
    for (const at::Tensor *tensor : all)
        norms.push_back(at::linalg_vector_norm(*tensor, norm_type));
    return at::linalg_vector_norm(at::stack(norms), norm_type);
}

at::Tensor norm_of(const std::vector<GradientOf> &of, double norm_type) {
    std::vector<const at::Tensor *> all;
    for (const GradientOf &g : of)
        all.push_back(&g.grad());
    const std::optional<at::Tensor> found = total_norm(all, norm_type);
    return found ? *found : norm_of_operators(all, norm_type);
}

// As PyTorch's operators round each of its steps.
template <typename Number> Number factor_in(double max_norm, Number norm, Language language) {
    const Number most = static_cast<Number>(max_norm), least = static_cast<Number>(1e-6);
    const Number factor =
        language == Language::PYTHON ? 1 / (norm + least) * most : most / (norm + least);
    return factor > 1 ? 1 : factor;
}

at::Tensor factor_of(double max_norm, const at::Tensor &norm, Language language) {
    if (norm.scalar_type() == at::kFloat)
        return operand(factor_in(max_norm, *norm.const_data_ptr<float>(), language));
    if (norm.scalar_type() == at::kDouble)
        return operand(factor_in(max_norm, *norm.const_data_ptr<double>(), language));
    const at::Tensor divisor = at::add(norm, operand(1e-6));
    const at::Tensor factor =
        language == Language::PYTHON
            ? at::mul(at::reciprocal(divisor), operand(max_norm))
            : at::div(at::empty_like(divisor, at::MemoryFormat::Preserve).fill_(max_norm), divisor);
    return at::clamp(factor, std::nullopt, 1.0);
}

} // namespace

std::optional<at::Tensor> total_norm(const std::vector<const at::Tensor *> &tensors,
                                     double norm_type) {
    if (norm_type == std::numeric_limits<double>::infinity())
        return largest(tensors);
    const auto found = norm_type == 2 ? norms(tensors) : std::nullopt;
    if (!found)
        return std::nullopt;
    std::vector<of_norm> total{{found->data(), found->size(), {1, 1}, 0, true}};
    find_norms(total, norm_in_order());
    at::Tensor norm = at::empty({}, at::kFloat);
    *norm.mutable_data_ptr<float>() = total[0].norm;
    return norm;
}

std::optional<Clipped> clip_norm(const std::vector<at::Tensor> &params, double max_norm,
                                 double norm_type, bool error_if_nonfinite, Language language) {
    const c10::AutoGradMode no_grad(false);
    FoundSlots found;
    const std::vector<GradientOf> of = gradients_alike(params, &found);
    if (of.empty())
        return std::nullopt;
    make_ready(of);
    const at::Tensor norm = norm_of(of, norm_type);
    if (error_if_nonfinite && !std::isfinite(norm.item<double>()))
        return std::nullopt; // torch's function says so
    return Clipped{norm, scale_all(of, factor_of(max_norm, norm, language))};
}

std::optional<bool> clip_with_norm(const std::vector<at::Tensor> &params, double max_norm,
                                   const at::Tensor &norm) {
    const c10::AutoGradMode no_grad(false);
    FoundSlots found;
    const std::vector<GradientOf> of = gradients_alike(params, &found);
    if (of.empty() || norm.dim() != 0 || !norm.device().is_cpu() ||
        norm.scalar_type() != of[0].grad().scalar_type())
        return std::nullopt;
    make_ready(of);
    return scale_all(of, factor_of(max_norm, norm, Language::PYTHON));
}

bool clip_value(const std::vector<at::Tensor> &params, double limit) {
    const c10::AutoGradMode no_grad(false);
    FoundSlots found;
    const std::vector<GradientOf> of = gradients_alike(params, &found);
    for (const GradientOf &g : of)
        g.grad().clamp_min_(-limit);
    for (const GradientOf &g : of)
        g.grad().clamp_max_(limit);
    return !of.empty();
}

std::optional<Unscaled> unscale_all(const std::vector<at::Tensor> &params,
                                    const at::Tensor &factor) {
    const c10::AutoGradMode no_grad(false);
    FoundSlots found;
    const std::vector<GradientOf> of = gradients_alike(params, &found);
    if (of.empty())
        return std::nullopt;
    make_ready(of);
    return unscale(of, factor);
}

} // namespace optfuse
