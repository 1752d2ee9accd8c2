// SPDX-License-Identifier: BSD-3-Clause
// muon.cpp: torch.optim.Muon, as _single_tensor_muon of its file. Numbers are
// combined in double, as Python does.
#include <ATen/ops/addmm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mm.h>

#include <cmath>

#include "base/compat.h"
#include "guard.h"
#include "native/native.h"

namespace optfuse {
namespace {

constexpr double kTooManySteps = 100; // which the class refuses

bool is_usual(const NativeInputs &in) {
    const double *h = in.hyper;
    return !std::isnan(h[muon_lr]) && h[muon_ns_steps] < kTooManySteps && in.grad.dim() == 2 &&
           in.grad.numel() != 0 && in.state[0].sizes() == in.grad.sizes() &&
           is_usual_state(in.state[0], in.grad);
}

// A polynomial of the matrix, by Newton-Schulz iterations, that takes its singular
// values towards 1.
at::Tensor orthogonal(const at::Tensor &matrix, const double *h) {
    const bool is_tall = matrix.size(0) > matrix.size(1);
    at::Tensor x = matrix.to(at::kBFloat16, false, !kMuonDividesInput);
    if (is_tall)
        x = x.t();
    x.div_(at::linalg_vector_norm(x, 2).clamp(h[muon_eps]));
    for (double i = 0; i < h[muon_ns_steps]; i++) {
        const at::Tensor gram = at::mm(x, x.t());
        const at::Tensor sum = at::addmm(gram, gram, gram, h[muon_b], h[muon_c]);
        x = at::addmm(x, sum, x, h[muon_a]);
    }
    return is_tall ? x.t() : x;
}

double adjusted(double lr, bool matches_rms, const at::Tensor &param) {
    const auto rows = static_cast<double>(param.size(0));
    const auto columns = static_cast<double>(param.size(1));
    return lr * (matches_rms ? 0.2 * std::sqrt(greatest(rows, columns))
                                            : std::sqrt(greatest(1.0, rows / columns)));
}

} // namespace

bool muon(const NativeInputs &in) {
    const double *h = in.hyper;
    if (in.state.size() != 1)
        return false;
    if (OF_GUARD(native) && !is_usual(in))
        return false;
    const at::Tensor &average = in.state[0];
    average.lerp_(in.grad, 1.0 - h[muon_momentum]);
    const at::Tensor direction =
        h[muon_nesterov] != 0 ? in.grad.lerp(average, h[muon_momentum]) : average;
    const at::Tensor update = orthogonal(direction, h);
    const bool divided = kMuonDividesInput && direction.is_same(average) &&
                         average.scalar_type() == at::kBFloat16;
    for (int times = divided ? 2 : 1; times > 0; times--)
        average.unsafeGetTensorImpl()->bump_version();
    in.param.mul_(operand(1.0 - h[muon_lr] * h[muon_weight_decay]));
    in.param.add_(update, -adjusted(h[muon_lr], h[muon_matches_rms] != 0, in.param));
    return true;
}

} // namespace optfuse
