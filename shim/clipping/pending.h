// SPDX-License-Identifier: BSD-3-Clause
// pending.h: gradients that clipping and unscaling leave to be multiplied, and their norms.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "memory/gradient.h"
#include "norm.h"
#include "plan/plan.h"

namespace optfuse {

struct References;

// scale.cpp
struct GradientOf {
    Plan *plan; // null: of a parameter of no fused optimizer
    c10::TensorImpl *param;
    size_t slot; // its number
    const at::Tensor &grad() const { return gradient_of(param); }
};
inline GradientOf of_slot(const Slot *slot) { return {slot->plan, slot->param, slot->index}; }
// Whether a kernel can multiply the gradient in place, without autograd having to know.
bool can_scale(const at::Tensor &grad, of_dtype *dtype);
// Before gradients are read: those on their way are waited for, and what may write to them runs.
void make_ready(const std::vector<GradientOf> &of);
// Multiplies a gradient by a 0-dim tensor whose value is `number`: a small one at once, since that
// takes less time than to remember it, and a large one when it is next read. norm: of the result,
// NaN if not known. A gradient that can't wait is multiplied at once. Returns whether it waits.
bool scale_one(const GradientOf &of, double number, float norm, const at::Tensor &factor);
// All of them; on a GPU the host does not wait for the factor's value. Returns whether some wait.
bool scale_all(const std::vector<GradientOf> &of, const at::Tensor &factor);
// Gradients of at least so many elements wait. Returns what it was.
int64_t wait_from(int64_t numel);
extern const of_scaling_host scaling_host;

// norm.cpp
// The 2-norms of float32 tensors; none if one of them can't be read here, or if norms_are_torchs()
// says no.
std::optional<std::vector<float>> norms(const std::vector<const at::Tensor *> &of);
// The infinity-norm of tensors of one dtype, which is its own; none if one can't be read here or waits
// for a factor, and where denormal numbers count as zeros.
std::optional<at::Tensor> largest(const std::vector<const at::Tensor *> &of);
// scale_one() of all, with their norms; none, with nothing changed, if one of them can't be read
// here or has a factor.
struct Unscaled {
    bool finite; // all of them, before
    bool some_wait;
};
std::optional<Unscaled> unscale(const std::vector<GradientOf> &of, const at::Tensor &factor);
// Norms of arrays, on all threads where that pays.
void find_norms(std::vector<of_norm> &items, of_norm_fn *norm);

// norm_trial.cpp
// Whether our pass adds up squares in the order in which this PyTorch does on this CPU, with as
// many threads: tried at the first question, and again when their number has changed.
bool norms_are_torchs();
of_norm_fn *norm_in_order(); // in that one, if so
// The verdict so far; nothing is tried.
enum class NormsTried { NOT_YET, EQUAL, DIFFERENT };
NormsTried norms_tried();

// clip.cpp: torch.nn.utils' functions on parameters of which fused optimizers have some. None, or
// false, and nothing was changed: there is no gradient, or one that our kernels can't multiply in
// place, find_slots() says no, or error_if_nonfinite has an error to raise.
struct Clipped {
    at::Tensor norm;
    bool some_wait;
};
// The function that it stands for: Python's multiplies by a reciprocal, C++'s divides.
enum class Language { PYTHON, CXX };
std::optional<Clipped> clip_norm(const std::vector<at::Tensor> &params, double max_norm,
                                 double norm_type, bool error_if_nonfinite, Language language);
std::optional<bool> clip_with_norm(const std::vector<at::Tensor> &params, double max_norm,
                                   const at::Tensor &norm); // whether some wait
bool clip_value(const std::vector<at::Tensor> &params, double limit);
std::optional<Unscaled> unscale_all(const std::vector<at::Tensor> &params,
                                    const at::Tensor &factor);
// The 2-norm of float32 tensors, or the infinity-norm of any: none where the functions above have none.
std::optional<at::Tensor> total_norm(const std::vector<const at::Tensor *> &tensors,
                                     double norm_type);

} // namespace optfuse
