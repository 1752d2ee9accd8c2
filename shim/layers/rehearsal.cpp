// SPDX-License-Identifier: BSD-3-Clause
// rehearsal.cpp: DistributedDataParallel orders its buckets by the first backward pass alone, so
// an order has to be chosen before any backward pass has run.
#include "layers/rehearsal.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones_like.h>

#include <algorithm>
#include <array>

#include "base/clock.h"
#include "base/plain_mode.h"

namespace optfuse {
namespace {

// Seconds of a run, as a rule: the first one may find caches cold, and other work on the machine
// slows training down, too.
template <class Work> double usual_seconds(const Work &work) {
    std::array<double, 3> found = {};
    for (double &took : found) {
        const double began = seconds_now();
        work();
        took = seconds_now() - began;
    }
    std::sort(found.begin(), found.end());
    return found[1];
}

of_layer_rehearsal of_linear(const at::Tensor &dy, const at::Tensor &x, const at::Tensor &w,
                             const at::Tensor &bias) {
    of_layer_rehearsal found = {};
    found.forward = usual_seconds(
        [&] { return bias.defined() ? at::addmm(bias, x, w.t()) : at::mm(x, w.t()); });
    found.input_gradient = x.requires_grad() ? usual_seconds([&] { return dy.mm(w); }) : 0;
    found.weight_gradient = usual_seconds([&] { return dy.t().mm(x); });
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
    found.forward = usual_seconds([&] {
        return at::convolution(x, w, bias, conv.stride, conv.padding, conv.dilation, false,
                               no_padding, conv.groups);
    });
    const bool has_dx = x.requires_grad();
    found.input_gradient =
        has_dx ? usual_seconds([&] { return backward({true, false, false}); }) : 0;
    found.weight_gradient = usual_seconds([&] { return backward({false, true, biased}); });
    return found;
}

} // namespace

bool is_rehearsed(const LayerUse &use) {
    const Layer *layer = use.known.layer.get();
    return layer != nullptr && !use.recomputed && layer->user.is_rehearsed(layer->user.ctx);
}

void rehearse(const LayerUse &use, double began, const at::Tensor &y, const at::Tensor &x,
              const at::Tensor &w, const at::Tensor &bias, const ConvOptions *conv) {
    const PlainMode plain; // a mode that counts operators counts none of these
    const at::Tensor dy = at::ones_like(y);
    of_layer_rehearsal found =
        conv ? of_convolution(dy, x, w, bias, *conv) : of_linear(dy, x, w, bias);
    found.began = began;
    found.ended = seconds_now();
    const of_layer_user &user = use.known.layer->user;
    user.rehearsed(user.ctx, use.known.layer->number, &found);
}

} // namespace optfuse
