// SPDX-License-Identifier: BSD-3-Clause
// operators.cpp: the operators by which Python clips and unscales gradients, as pending.h says.
// They find the slots of parameters.
#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include <tuple>
#include <utility>

#include "clipping/late_norm.h"
#include "clipping/pending.h"
#include "plan/arguments.h"
#include "plan/slots.h"
#include "python/gil.h"

namespace optfuse {
namespace {

constexpr const char *kWhat = "gradients are clipped or unscaled";

// Gradients of parameters that fused optimizers have, or had: another thread may let go of one, and
// change the groups of another. The plans live as long as *found.
std::vector<GradientOf> gradients_of(const std::vector<at::Tensor> &params, FoundSlots *found) {
    refuse_fake_tensors(kWhat);
    if (!find_slots(params, found)) {
        found->slots.clear();
        for (const at::Tensor &param : params)
            found->slots.push_back({nullptr, param.unsafeGetTensorImpl(), 0});
    }
    std::vector<GradientOf> of;
    for (const FoundSlots::Found &slot : found->slots)
        of.push_back({slot.plan, slot.param, slot.index});
    make_ready(of);
    return of;
}

// Multiplies the gradients of parameters by a 0-dim tensor, rounding to their dtypes.
// Nobody may write to the factor any more.
void scale(std::vector<at::Tensor> params, const at::Tensor &factor) {
    {
        FoundSlots found;
        scale_all(gradients_of(params, &found), factor);
    }
    let_go(std::move(params));
}

std::optional<at::Tensor> norms_of(std::vector<at::Tensor> params) {
    std::optional<std::vector<float>> numbers;
    {
        FoundSlots found;
        std::vector<const at::Tensor *> all;
        for (const GradientOf &g : gradients_of(params, &found))
            all.push_back(&g.grad());
        numbers = norms(all);
    }
    let_go(std::move(params));
    return numbers ? std::optional<at::Tensor>(at::tensor(*numbers)) : std::nullopt;
}

// The norm, and whether gradients wait.
std::tuple<std::optional<at::Tensor>, bool> clip(std::vector<at::Tensor> params, double max_norm,
                                                 double norm_type, bool error_if_nonfinite) {
    refuse_fake_tensors(kWhat);
    const auto done = clip_norm(params, max_norm, norm_type, error_if_nonfinite, Language::PYTHON);
    let_go(std::move(params));
    if (!done)
        return {std::nullopt, false};
    return {done->norm, done->some_wait};
}

std::optional<bool> clip_with(std::vector<at::Tensor> params, double max_norm,
                              const at::Tensor &norm) {
    refuse_fake_tensors(kWhat);
    const auto some_wait = clip_with_norm(params, max_norm, norm);
    let_go(std::move(params));
    return some_wait;
}

bool clip_values(std::vector<at::Tensor> params, double limit) {
    refuse_fake_tensors(kWhat);
    const bool clipped = clip_value(params, limit);
    let_go(std::move(params));
    return clipped;
}

// Whether all were finite, and whether gradients wait.
std::tuple<std::optional<bool>, bool> unscale_of(std::vector<at::Tensor> params,
                                                 const at::Tensor &factor) {
    refuse_fake_tensors(kWhat);
    const auto done = unscale_all(params, factor);
    let_go(std::move(params));
    if (!done)
        return {std::nullopt, false};
    return {done->finite, done->some_wait};
}

std::optional<at::Tensor> norm_of_all(const std::vector<at::Tensor> &tensors, double norm_type) {
    refuse_fake_tensors("norms are computed");
    std::vector<const at::Tensor *> all;
    for (const at::Tensor &tensor : tensors)
        all.push_back(&tensor);
    const at::Tensor late = norm_type == 2 ? late_norm(all) : at::Tensor();
    return late.defined() ? late : total_norm(all, norm_type);
}

} // namespace
} // namespace optfuse

TORCH_LIBRARY_FRAGMENT(optfuse, m) {
    m.def("scale(Tensor[] params, Tensor factor) -> ()", optfuse::scale);
    m.def("norms(Tensor[] params) -> Tensor?", optfuse::norms_of);
    // The parameters are named and not read: their updates may wait on.
    m.impl("scale", torch::dispatch(optfuse::kPendingKey, optfuse::scale));
    m.impl("norms", torch::dispatch(optfuse::kPendingKey, optfuse::norms_of));
    m.def("clip(Tensor[] params, float max_norm, float norm_type, bool error_if_nonfinite) "
          "-> (Tensor?, bool)",
          optfuse::clip);
    m.def("clip_with_norm(Tensor[] params, float max_norm, Tensor norm) -> bool?",
          optfuse::clip_with);
    m.def("clip_value(Tensor[] params, float limit) -> bool", optfuse::clip_values);
    m.def("unscale(Tensor[] params, Tensor factor) -> (bool?, bool)", optfuse::unscale_of);
    m.def("total_norm(Tensor[] tensors, float norm_type) -> Tensor?", optfuse::norm_of_all);
    m.def("norms_are_torchs() -> bool", optfuse::norms_are_torchs);
}
