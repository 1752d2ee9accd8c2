// SPDX-License-Identifier: BSD-3-Clause
// clip.cpp: what torch.nn.utils does to gradients by many operators, called from Python, in one
// call.
#include <ATen/native/ForeachUtils.h>
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
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "clipping/late_norm.h"
#include "clipping/pending.h"
#include "floating.h"
#include "native/native.h"
#include "plan/slots.h"

namespace optfuse {
namespace {

using ConstTensors = std::vector<const at::Tensor *>;

// The gradients that are there, if all are on the CPU and may be multiplied by our kernels; none: of
// some that is not so. Their plans live as long as *found.
std::vector<GradientOf> gradients_at_hand(const std::vector<at::Tensor> &params,
                                          FoundSlots *found) {
    std::vector<GradientOf> of;
    of_dtype dtype;
    if (!find_slots(params, found))
        return {};
    of.reserve(found->slots.size());
    for (const FoundSlots::Found &slot : found->slots) {
        const GradientOf g = {slot.plan, slot.param, slot.index};
        if (!g.grad().defined())
            continue;
        if (!can_scale(g.grad(), &dtype) || !g.grad().device().is_cpu())
            return {};
        of.push_back(g);
    }
    return of;
}

// The dtype of all together.
at::ScalarType widest(const ConstTensors &all) {
    at::ScalarType wide = all[0]->scalar_type();
    for (const at::Tensor *tensor : all)
        wide = c10::promoteTypes(wide, tensor->scalar_type());
    return wide;
}

// In the order in which torch.nn.utils takes one dtype after the other.
std::vector<ConstTensors> by_dtype(const ConstTensors &all) {
    const auto is_another = [&all](const at::Tensor *tensor) {
        return tensor->scalar_type() != all[0]->scalar_type();
    };
    if (std::none_of(all.begin(), all.end(), is_another))
        return {all};
    std::vector<ConstTensors> groups;
    std::vector<std::optional<at::Tensor>> firsts;
    for (const at::Tensor *tensor : all) {
        const auto is_its = [tensor](const ConstTensors &group) {
            return group[0]->scalar_type() == tensor->scalar_type();
        };
        const auto group = std::find_if(groups.begin(), groups.end(), is_its);
        if (group != groups.end()) {
            group->push_back(tensor);
            continue;
        }
        groups.push_back({tensor});
        firsts.push_back(*tensor);
    }
    std::vector<ConstTensors> ordered;
    for (const auto &[key, unused] :
         at::native::_group_tensors_by_first_tensors_device_and_dtype({firsts}, false))
        for (const ConstTensors &group : groups)
            if (group[0]->scalar_type() == key.second)
                ordered.push_back(group);
    return ordered;
}

at::Tensor norm_of_operators(const ConstTensors &all, double norm_type) {
    std::vector<at::Tensor> norms;
    for (const ConstTensors &group : by_dtype(all))
        for (const at::Tensor *tensor : group)
            norms.push_back(at::linalg_vector_norm(*tensor, norm_type));
    return at::linalg_vector_norm(at::stack(norms), norm_type);
}

ConstTensors their_gradients(const std::vector<GradientOf> &of) {
    ConstTensors all;
    all.reserve(of.size());
    for (const GradientOf &g : of)
        all.push_back(&g.grad());
    return all;
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
    if (norm.scalar_type() == at::kDouble) // no wrapped number: it may be wider than a gradient
        return at::scalar_tensor(factor_in(max_norm, *norm.const_data_ptr<double>(), language),
                                 at::kDouble);
    const at::Tensor divisor = at::add(norm, operand(1e-6));
    const at::Tensor factor =
        language == Language::PYTHON
            ? at::mul(at::reciprocal(divisor), operand(max_norm))
            : at::div(at::empty_like(divisor, at::MemoryFormat::Preserve).fill_(max_norm), divisor);
    return at::clamp(factor, std::nullopt, 1.0);
}

// Whether clipping by it surely multiplies by 1, whatever its number is.
bool changes_nothing(const at::Tensor &norm, double max_norm, Language language) {
    const std::optional<float> most = most_of(norm);
    return most && factor_in(max_norm, *most, language) == 1 && of_floating_now() == 0;
}

std::optional<at::Tensor> root_of_all(const ConstTensors &tensors) {
    const auto found = norms(tensors);
    if (!found)
        return std::nullopt;
    const at::Tensor all = at::empty({static_cast<int64_t>(found->size())}, at::kFloat);
    std::copy(found->begin(), found->end(), all.mutable_data_ptr<float>());
    const auto norm = norms({&all});
    return norm ? std::optional(at::scalar_tensor(norm->at(0), at::kFloat)) : std::nullopt;
}

std::optional<at::Tensor> largest_of_all(const ConstTensors &tensors) {
    double most = 0;
    for (const ConstTensors &group : by_dtype(tensors)) {
        const std::optional<at::Tensor> found = largest(group);
        if (!found)
            return std::nullopt;
        const double its = found->item<double>();
        most = std::isnan(most) || its <= most ? most : its;
    }
    return at::scalar_tensor(most, widest(tensors));
}

} // namespace

std::optional<at::Tensor> total_norm(const ConstTensors &tensors, double norm_type) {
    if (norm_type == 2 && !tensors.empty())
        return root_of_all(tensors);
    const bool is_largest = norm_type == std::numeric_limits<double>::infinity();
    return is_largest && !tensors.empty() ? largest_of_all(tensors) : std::nullopt;
}

std::optional<Clipped> clip_norm(const std::vector<at::Tensor> &params, double max_norm,
                                 double norm_type, bool error_if_nonfinite, Language language) {
    const c10::AutoGradMode no_grad(false);
    FoundSlots found;
    const std::vector<GradientOf> of = gradients_at_hand(params, &found);
    if (of.empty())
        return std::nullopt;
    const ConstTensors all = their_gradients(of);
    if (language == Language::CXX && by_dtype(all).size() > 1)
        return std::nullopt; // it adds them up in another order
    make_ready(of);
    const at::Tensor late = norm_type == 2 ? late_norm(all) : at::Tensor();
    if (changes_nothing(late, max_norm, language))
        return Clipped{late, scale_all(of, operand(1.0))};
    const std::optional<at::Tensor> ours = total_norm(all, norm_type);
    const at::Tensor norm = ours ? *ours : norm_of_operators(all, norm_type);
    if (error_if_nonfinite && !std::isfinite(norm.item<double>()))
        return std::nullopt; // torch's function says so
    return Clipped{norm, scale_all(of, factor_of(max_norm, norm, language))};
}

std::optional<bool> clip_with_norm(const std::vector<at::Tensor> &params, double max_norm,
                                   const at::Tensor &norm) {
    const c10::AutoGradMode no_grad(false);
    FoundSlots found;
    const std::vector<GradientOf> of = gradients_at_hand(params, &found);
    if (of.empty() || norm.dim() != 0 || !norm.device().is_cpu() ||
        norm.scalar_type() != widest(their_gradients(of)))
        return std::nullopt;
    make_ready(of);
    if (changes_nothing(norm, max_norm, Language::PYTHON))
        return scale_all(of, operand(1.0));
    compute_now(norm.unsafeGetTensorImpl());
    return scale_all(of, factor_of(max_norm, norm, Language::PYTHON));
}

bool clip_value(const std::vector<at::Tensor> &params, double limit) {
    const c10::AutoGradMode no_grad(false);
    FoundSlots found;
    const std::vector<GradientOf> of = gradients_at_hand(params, &found);
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
    const std::vector<GradientOf> of = gradients_at_hand(params, &found);
    if (of.empty())
        return std::nullopt;
    make_ready(of);
    return unscale(of, factor);
}

} // namespace optfuse
