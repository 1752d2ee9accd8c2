// SPDX-License-Identifier: BSD-3-Clause
// reference.cpp: the operators that Python's torch.optim calls on a GPU: with fused=True for
// Adam, AdamW and SGD, and by default, which is foreach=True there, for the others.
#include "doors/gpu_reference.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/full.h>

#include <cstring>
#include <string>

#include "base/error.h"
#include "rules/adagrad.h"
#include "rules/adam.h"
#include "rules/rmsprop.h"
#include "rules/sgd.h"

namespace optfuse {
namespace {

using Hyper = std::vector<double>;
using State = std::vector<Tensors>;

void adam(const Hyper &h, int step, const Tensors &params, Tensors grads, const State &state) {
    Tensors counters;
    for (const at::Tensor &param : params)
        counters.push_back(at::full({}, step, param.options().dtype(at::kFloat)));
    const auto update = [&](auto op) {
        op(params, grads, state[adam_exp_avg], state[adam_exp_avg_sq], state[adam_max_exp_avg_sq],
           counters, h[adam_lr], h[adam_beta1], h[adam_beta2], h[adam_weight_decay], h[adam_eps],
           h[adam_amsgrad] != 0, h[adam_maximize] != 0);
    };
    if (h[adam_decoupled_weight_decay] != 0)
        update([](const auto &...of) { at::_fused_adamw_(of...); });
    else
        update([](const auto &...of) { at::_fused_adam_(of...); });
}

void sgd(const Hyper &h, int step, const Tensors &params, Tensors grads, const State &state) {
    at::_fused_sgd_(params, grads, state[sgd_momentum_buffer], h[sgd_weight_decay], h[sgd_momentum],
                    h[sgd_lr], h[sgd_dampening], h[sgd_nesterov] != 0, h[sgd_maximize] != 0,
                    step == 1);
}

void rmsprop(const Hyper &h, int, const Tensors &params, Tensors grads, const State &state) {
    const Tensors &squares = state[rmsprop_square_avg], &means = state[rmsprop_grad_avg],
                  &buffers = state[rmsprop_momentum_buffer];
    const double weight = 1 - h[rmsprop_alpha];
    if (h[rmsprop_weight_decay] != 0)
        grads = at::_foreach_add(grads, params, h[rmsprop_weight_decay]);
    at::_foreach_mul_(squares, h[rmsprop_alpha]);
    at::_foreach_addcmul_(squares, grads, grads, weight);
    Tensors roots = squares;
    if (h[rmsprop_centered] != 0) {
        at::_foreach_lerp_(means, grads, weight);
        roots = at::_foreach_addcmul(squares, means, means, -1);
    }
    roots = at::_foreach_sqrt(roots);
    at::_foreach_add_(roots, h[rmsprop_eps]);
    if (h[rmsprop_momentum] > 0) {
        at::_foreach_mul_(buffers, h[rmsprop_momentum]);
        at::_foreach_addcdiv_(buffers, grads, roots);
        at::_foreach_add_(params, buffers, -h[rmsprop_lr]);
    } else {
        at::_foreach_addcdiv_(params, grads, roots, -h[rmsprop_lr]);
    }
}

void adagrad(const Hyper &h, int step, const Tensors &params, Tensors grads, const State &state) {
    const Tensors &sums = state[adagrad_sum];
    const double rate = -h[adagrad_lr] / (1 + (step - 1) * h[adagrad_lr_decay]);
    if (h[adagrad_weight_decay] != 0)
        grads = at::_foreach_add(grads, params, h[adagrad_weight_decay]);
    at::_foreach_addcmul_(sums, grads, grads, 1);
    const Tensors deviations = at::_foreach_sqrt(sums);
    at::_foreach_add_(deviations, h[adagrad_eps]);
    grads = at::_foreach_mul(grads, std::vector<at::Scalar>(grads.size(), rate));
    at::_foreach_addcdiv_(params, grads, deviations);
}

const GpuReference references[] = {
    {"adam", "PyTorch's fused operator", adam},
    {"sgd", "PyTorch's fused operator", sgd},
    {"rmsprop", "PyTorch's multi-tensor operators", rmsprop},
    {"adagrad", "PyTorch's multi-tensor operators", adagrad},
};

} // namespace

const GpuReference &gpu_reference(const char *rule) {
    for (const GpuReference &row : references)
        if (std::strcmp(row.rule, rule) == 0)
            return row;
    fail("optfuse: the kernels of " + std::string(rule) +
         " have no trial on GPUs: this is an error of optfuse");
}

} // namespace optfuse
