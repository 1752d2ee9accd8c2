// SPDX-License-Identifier: BSD-3-Clause
// operators.cpp: the operators by which Python clips and unscales gradients, as pending.h says.
// Those of parameters find their slots; others are told plans and slots.
#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include <tuple>
#include <utility>

#include "arguments.h"
#include "clipping/pending.h"
#include "python/gil.h"

namespace optfuse {
namespace {

constexpr const char *kWhat = "gradients are clipped or unscaled";

std::vector<GradientOf> gradients_of(const std::vector<int64_t> &plans,
                                     const std::vector<int64_t> &slots) {
    refuse_fake_tensors(kWhat);
    std::vector<GradientOf> of;
    for (size_t i = 0; i < slots.size(); i++)
        of.push_back(of_slot(&slot_at(plan_at(plans[i]), slots[i])));
    make_ready(of);
    return of;
}

// Multiplies the gradients of slots by a 0-dim tensor, rounding to their dtypes.
// Nobody may write to the factor any more.
void scale_slots(const std::vector<int64_t> &plans, const std::vector<int64_t> &slots,
                 const at::Tensor &factor) {
    scale_all(gradients_of(plans, slots), factor);
}

std::optional<at::Tensor> norms_of_slots(const std::vector<int64_t> &plans,
                                         const std::vector<int64_t> &slots) {
    const std::vector<GradientOf> of = gradients_of(plans, slots);
    std::vector<const at::Tensor *> all;
    for (const GradientOf &g : of)
        all.push_back(&g.grad());
    const std::optional<std::vector<float>> found = norms(all);
    return found ? std::optional<at::Tensor>(at::tensor(*found)) : std::nullopt;
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
    return total_norm(all, norm_type);
}

} // namespace
} // namespace optfuse

TORCH_LIBRARY_FRAGMENT(optfuse, m) {
    m.def("scale(int[] plans, int[] slots, Tensor factor) -> ()", optfuse::scale_slots);
    m.def("norms(int[] plans, int[] slots) -> Tensor?", optfuse::norms_of_slots);
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
