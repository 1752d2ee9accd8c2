// SPDX-License-Identifier: BSD-3-Clause
// collector.cpp: see collector.h. Sums are raw, of rows as they come: whoever takes them divides
// by the rows of all processes, so that unequal batches and accumulation are exact.
#include "kfac/collector.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "kfac/gram.h"
#include "kfac/packed.h"

namespace optfuse {
namespace {

// Products are no part of the model's graph, and not in autocast's precision.
struct Aside {
    const at::AutoDispatchBelowADInplaceOrView below;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
    const at::NoGradGuard no_grad;
};

} // namespace

struct Collector::Contribution {
    const at::Tensor &matrix; // undefined: zeros
    double scale;
};

Collector::Collector(std::vector<CollectedLayer> layers, const at::TensorOptions &options,
                     const std::string &group)
    : layers_(std::move(layers)) {
    if (!group.empty())
        group_ = c10d::resolve_process_group(group);
    std::vector<size_t> elements;
    int64_t total = 0;
    for (size_t slot = 0; slot < 2 * layers_.size(); slot++) {
        elements.push_back(static_cast<size_t>(packed_size(size_of(slot))));
        total += packed_size(size_of(slot));
    }
    of_factors_host host = {};
    host.struct_size = sizeof host;
    host.ctx = this;
    host.add = add_to_sums;
    host.reduce = reduce;
    of_factors *core = nullptr;
    check(of_factors_create(elements.data(), elements.size(), &host, &core));
    core_.reset(core);
    sums_ = at::zeros({total}, options);
}

int64_t Collector::size_of(size_t slot) const {
    const CollectedLayer &layer = layers_[slot / 2];
    return slot % 2 == 0 ? layer.inputs + layer.ones : layer.outputs;
}

void Collector::check(of_status status) {
    if (failure_)
        std::rethrow_exception(std::exchange(failure_, nullptr));
    optfuse::check(status);
}

void Collector::arrange(const std::vector<int64_t> &order, const std::vector<int64_t> &group) {
    const std::vector<uint32_t> slots(order.begin(), order.end());
    const std::vector<uint32_t> groups(group.begin(), group.end());
    check(of_factors_arrange(core_.get(), slots.data(), groups.data()));
}

void Collector::begin(double weight) {
    wait();
    sums_.zero_();
    late_.reset();
    weight_ = weight;
    of_factors_begin(core_.get());
}

void Collector::end() {
    check(of_factors_end(core_.get()));
}

void Collector::wait() {
    for (const auto &work : std::exchange(sent_, {}))
        work->wait();
}

std::vector<of_factor_slot> Collector::slots() const {
    std::vector<of_factor_slot> found(2 * layers_.size());
    of_factors_slots(core_.get(), found.data());
    return found;
}

at::Tensor Collector::sums(const of_factor_slot &slot, size_t number, bool late) const {
    const at::Tensor &all = late ? late_ : sums_;
    return all.narrow(0, static_cast<int64_t>(slot.offset), packed_size(size_of(number)));
}

at::Tensor Collector::late() {
    if (!late_.defined())
        late_ = at::zeros_like(sums_);
    return late_;
}

void Collector::input(size_t layer, uint64_t collection, const at::Tensor &x,
                      const ConvOptions *conv, at::IntArrayRef kernel) {
    const Aside aside;
    const bool ones = layers_[layer].ones;
    const at::ScalarType type = sums_.scalar_type();
    const at::Tensor matrix =
        conv ? gram_of_patches(x, *conv, kernel, ones, type) : gram_of_rows(x, ones, type);
    add(2 * layer, collection, static_cast<double>(x.size(0)), matrix, 1);
}

void Collector::output_gradient(size_t layer, uint64_t collection, const at::Tensor &g,
                                const ConvOptions *conv) {
    const Aside aside;
    const size_t slot = 2 * layer + 1;
    if (!g.defined()) {
        add(slot, collection, 0, at::Tensor(), 1);
        return;
    }
    const at::Tensor rows = conv ? g.permute({0, 2, 3, 1}).reshape({-1, g.size(1)}) : g;
    const double positions = conv ? static_cast<double>(g.size(2) * g.size(3)) : 1;
    const at::Tensor matrix = gram_of_rows(rows, false, sums_.scalar_type());
    add(slot, collection, static_cast<double>(g.size(0)), matrix, weight_ * weight_ / positions);
}

void Collector::add(size_t slot, uint64_t collection, double rows, const at::Tensor &matrix,
                    double scale) {
    const Contribution contribution{matrix, scale};
    check(of_factors_add(core_.get(), slot, collection, rows, seconds_now(), &contribution));
}

bool Collector::add_to_sums(void *ctx, const void *contribution, size_t offset, bool late) {
    auto *self = static_cast<Collector *>(ctx);
    const auto *given = static_cast<const Contribution *>(contribution);
    if (!given->matrix.defined())
        return true;
    try {
        const at::Tensor to = late ? self->late() : self->sums_;
        const int64_t n = packed_size(given->matrix.size(0));
        add_packed(to.narrow(0, static_cast<int64_t>(offset), n), given->matrix, given->scale);
    } catch (...) {
        self->failure_ = std::current_exception();
    }
    return !self->failure_;
}

bool Collector::reduce(void *ctx, size_t offset, size_t n) {
    auto *self = static_cast<Collector *>(ctx);
    if (!self->group_)
        return true;
    try {
        std::vector<at::Tensor> part{
            self->sums_.narrow(0, static_cast<int64_t>(offset), static_cast<int64_t>(n))};
        self->sent_.push_back(self->group_->allreduce(part));
    } catch (...) {
        self->failure_ = std::current_exception();
    }
    return !self->failure_;
}

} // namespace optfuse
