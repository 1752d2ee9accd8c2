// SPDX-License-Identifier: BSD-3-Clause
// rehearsal.cpp: DistributedDataParallel orders its buckets by the first backward pass alone, so
// an order has to be chosen before any backward pass has run.
#include "layers/rehearsal.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones_like.h>

#include <algorithm>
#include <limits>

#include "clock.h"

namespace optfuse {
namespace {

constexpr int kRounds = 3;

// Seconds of the shortest of some runs: other work on the machine only adds time.
template <class Work> double shortest(const Work &work) {
    double found = std::numeric_limits<double>::infinity();
    for (int i = 0; i < kRounds; i++) {
        const double began = seconds_now();
        work();
        found = std::min(found, seconds_now() - began);
    }
    return found;
}

of_layer_rehearsal of_linear(const at::Tensor &dy, const at::Tensor &x, const at::Tensor &w,
                             const at::Tensor &bias) {
    of_layer_rehearsal found = {};
    found.forward =
        shortest([&] { return bias.defined() ? at::addmm(bias, x, w.t()) : at::mm(x, w.t()); });
    found.input_gradient = x.requires_grad() ? shortest([&] { return dy.mm(w); }) : 0;
    found.weight_gradient = shortest([&] { return dy.t().mm(x); });
    return found;
}

of_layer_rehearsal of_convolution(const at::Tensor &dy, const at::Tensor &x, const at::Tensor &w,
                                  const at::Tensor &bias, const ConvOptions &conv) {
    static constexpr int64_t no_padding[] = {0, 0};
    const bool biased = bias.defined();
    const at::OptionalIntArrayRef sizes =
        biased ? at::OptionalIntArrayRef(bias.sizes()) : at::OptionalIntArrayRef();
    const auto backward = [&](std::array<bool, 3> mask) {
        return at::convolution_backward(dy, x, w, sizes, conv.stride, conv.padding, conv.dilation,
                                        false, no_padding, conv.groups, mask);
    };
    of_layer_rehearsal found = {};
    found.forward = shortest([&] {
        return at::convolution(x, w, bias, conv.stride, conv.padding, conv.dilation, false,
                               no_padding, conv.groups);
    });
    const bool has_dx = x.requires_grad();
    found.input_gradient = has_dx ? shortest([&] { return backward({true, false, false}); }) : 0;
    found.weight_gradient = shortest([&] { return backward({false, true, biased}); });
    return found;
}

} // namespace

bool is_rehearsed(const LayerUse &use) {
    const Layer *layer = use.known.layer.get();
    return layer != nullptr && !use.recomputed && layer->user.is_rehearsed(layer->user.ctx);
}

void rehearse(const LayerUse &use, double began, const at::Tensor &y, const at::Tensor &x,
              const at::Tensor &w, const at::Tensor &bias, const ConvOptions *conv) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const at::Tensor dy = at::ones_like(y);
    of_layer_rehearsal found =
        conv ? of_convolution(dy, x, w, bias, *conv) : of_linear(dy, x, w, bias);
    found.began = began;
    found.ended = seconds_now();
    const of_layer_user &user = use.known.layer->user;
    user.rehearsed(user.ctx, use.known.layer->number, &found);
}

} // namespace optfuse
