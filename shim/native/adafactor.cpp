// SPDX-License-Identifier: BSD-3-Clause
// adafactor.cpp: torch.optim.Adafactor, as _single_tensor_adafactor of its file.
// Numbers are combined in double, as Python does.
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/neg.h>

#include <cmath>
#include <limits>

#include "guard.h"
#include "memory/memory.h"
#include "native/native.h"

namespace optfuse {
namespace {

// The gradient's shape, but 1 at this dimension, which is counted from the end.
bool is_mean(const at::Tensor &state, const at::Tensor &grad, int64_t from_end) {
    const int64_t dim = grad.dim();
    if (state.dim() != dim)
        return false;
    for (int64_t i = 0; i < dim; i++)
        if (state.size(i) != (i == dim - from_end ? 1 : grad.size(i)))
            return false;
    return is_usual_state(state, grad);
}

bool is_factored(const NativeInputs &in) { return in.grad.dim() > 1; }

bool is_usual_step(const at::Tensor &step) {
    const bool counts = step.scalar_type() == at::kFloat || step.scalar_type() == at::kDouble;
    return step.is_cpu() && counts && step.dim() == 0 && is_usual_state(step, step);
}

bool has_usual_state(const NativeInputs &in) {
    return is_factored(in)
               ? is_mean(in.state[1], in.grad, 1) && is_mean(in.state[2], in.grad, 2)
               : in.state[1].sizes() == in.grad.sizes() && is_usual_state(in.state[1], in.grad);
}

// The number of this update, counted in the state's own precision.
double next_step(const at::Tensor &step) {
    const void *data = data_of(step.unsafeGetTensorImpl());
    return step.scalar_type() == at::kDouble
               ? *static_cast<const double *>(data) + 1.0
               : static_cast<double>(*static_cast<const float *>(data) + 1.0f);
}

void set_step(const at::Tensor &step, double number) {
    void *data = data_of(step.unsafeGetTensorImpl());
    if (step.scalar_type() == at::kDouble)
        *static_cast<double *>(data) = number;
    else
        *static_cast<float *>(data) = static_cast<float>(number);
    step.unsafeGetTensorImpl()->bump_version();
}

double root_of_size(const at::Tensor &x) { return std::pow(static_cast<double>(x.numel()), 0.5); }

double norm_of(const at::Tensor &x) { return at::linalg_vector_norm(x, 2).item<double>(); }

double epsilon_of(at::ScalarType dtype) {
    switch (dtype) {
    case at::kDouble:
        return std::numeric_limits<double>::epsilon();
    case at::kBFloat16:
        return std::numeric_limits<c10::BFloat16>::epsilon();
    case at::kHalf:
        return std::numeric_limits<c10::Half>::epsilon();
    default:
        return std::numeric_limits<float>::epsilon();
    }
}

// Where Python would divide by zero or overflow it has to say so itself.
bool is_usual(const NativeInputs &in, double step, double weight) {
    const double *h = in.hyper;
    return !std::isnan(h[adafactor_lr]) && h[adafactor_foreach] == 0 && has_usual_state(in) &&
           step >= 1 && std::isfinite(step) && std::isfinite(weight) && in.param.numel() != 0 &&
           root_of_size(in.grad) * h[adafactor_d] != 0;
}

void update_average(const at::Tensor &state, const at::Tensor &squares, double weight) {
    state.lerp_(squares, weight);
    state.unsafeGetTensorImpl()->bump_version();
}

// The mean of the squares along a dimension.
at::Tensor mean_square(const at::Tensor &grad, int64_t dim) {
    const at::Tensor norm = at::linalg_vector_norm(grad, 2, at::IntArrayRef{dim}, true);
    return norm.square_().div_(operand(grad.size(dim)));
}

at::Tensor variance(const NativeInputs &in, const at::Tensor &grad, double weight, double eps) {
    if (!is_factored(in)) {
        update_average(in.state[1], at::mul(grad, grad), weight);
        return in.state[1].clone();
    }
    const at::Tensor &row = in.state[1], &column = in.state[2];
    update_average(row, mean_square(grad, -1), weight);
    update_average(column, mean_square(grad, -2), weight);
    return at::matmul(row, column).div_(row.mean(at::IntArrayRef{-2}, true).clamp_(eps));
}

} // namespace

bool adafactor(const NativeInputs &in) {
    const double *h = in.hyper;
    if (in.state.size() != (is_factored(in) ? 3 : 2))
        return false;
    if (!is_usual_step(in.state[0]))
        return false;
    const double step = next_step(in.state[0]);
    const double weight = std::pow(step, h[adafactor_beta2_decay]);
    if (OF_GUARD(native) && !is_usual(in, step, weight))
        return false;
    const at::Tensor grad = h[adafactor_maximize] == 0 ? in.grad : at::neg(in.grad);
    const double eps =
        std::isnan(h[adafactor_eps1]) ? epsilon_of(in.param.scalar_type()) : h[adafactor_eps1];
    set_step(in.state[0], step);
    const double rate = least(h[adafactor_lr], 1.0 / std::pow(step, 0.5));
    const double size = norm_of(in.param) / root_of_size(in.param);
    const double alpha = greatest(h[adafactor_eps2], size) * rate;
    if (h[adafactor_weight_decay] != 0)
        in.param.mul_(operand(1.0 - h[adafactor_lr] * h[adafactor_weight_decay]));
    const at::Tensor update = variance(in, grad, weight, eps).clamp_(eps * eps).rsqrt_();
    update.mul_(grad);
    const double spread = norm_of(update) / (root_of_size(update) * h[adafactor_d]);
    in.param.add_(update, -alpha / greatest(1.0, spread));
    return true;
}

} // namespace optfuse
