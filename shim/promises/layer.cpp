// SPDX-License-Identifier: BSD-3-Clause
#include "promises/layer.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>

#include "absent/consumed.h"
#include "base/compat.h"
#include "base/plain_mode.h"
#include "plan/refuse.h"
#include "promises/embedding.h"
#include "promises/linear.h"
#include "promises/promise.h"

namespace optfuse {
namespace {

// All of a smaller layer stays in the caches anyway.
constexpr int64_t kLeastElements = 1 << 18;
// If somebody looked at so many of the last promises, none is made for a while.
constexpr unsigned kLast = 0xf;
constexpr int kTooMany = 2;
constexpr char kFactors[] = "panels take dense matrices of one dtype on the CPU";

// A tensor with memory on the CPU that holds its numbers as they are: they are neither absent nor
// late, which a mark would say.
bool is_plain_memory(const at::Tensor &t) {
    return t.layout() == c10::kStrided && t.device().is_cpu() && t.has_storage() &&
           !has_mark(t.unsafeGetTensorImpl()) && !is_lazy(t.unsafeGetTensorImpl()) &&
           !t.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

bool is_factor(const at::Tensor &t) {
    return is_plain_memory(t) && t.dim() == 2 && t.numel() != 0 && can_multiply(t.scalar_type());
}

// The factors are kept in the gradient's place, and are small beside it.
bool is_thin(int64_t rows, int64_t n, int64_t k) {
    return 2 * rows * (n + k) <= n * k;
}

// PyTorch's product in backward() casts what it gets, too.
bool is_cast_by_autocast(at::ScalarType dtype) {
    return at::autocast::is_autocast_enabled(at::kCPU) && dtype != at::kDouble &&
           dtype != at::autocast::get_autocast_dtype(at::kCPU);
}

// As a profiler does that records shapes or stacks.
bool addresses_are_noted() {
    const auto observers = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
    return (observers.has_value() && observers->needs_inputs_) || !consumed_are_sealed();
}

bool can_be_promised(const c10::TensorImpl *weight, bool forced) {
    const auto dtype = weight->dtype().toScalarType();
    return weight->device().is_cpu() && weight->dim() == 2 &&
           !weight->key_set().has(c10::DispatchKey::Python) && weight->is_contiguous() &&
           weight->numel() >= (forced ? 1 : kLeastElements) && can_multiply(dtype);
}

} // namespace

void let_promise(Plan &plan, Slot *slot) {
    const bool forced = plan.promising == Promising::FORCED;
    if (plan.promising == Promising::OFF || !can_be_promised(slot->param, forced))
        return;
    auto &layers = plan.promising_layers;
    const auto is_its = [slot](const auto &layer) { return layer->label() == slot->label; };
    const auto found = std::find_if(layers.begin(), layers.end(), is_its);
    const std::shared_ptr<PromisingLayer> layer =
        found != layers.end() ? *found
                              : layers.emplace_back(new PromisingLayer(slot->label, forced));
    know_promising(slot->param, layer);
    slot->promising = std::shared_ptr<void>(nullptr, [weight = slot->param, layer](void *) {
        forget_promising(weight, layer.get());
    });
}

bool PromisingLayer::takes(int64_t rows, const at::Tensor &weight) const {
    return forced_ || is_thin(rows, weight.size(0), weight.size(1));
}

PromisingLayer::Counts PromisingLayer::counts() const {
    const std::lock_guard<std::mutex> guard(layers_lock());
    return counts_;
}

std::mutex &layers_lock() {
    static auto *only = new std::mutex; // leaked: threads may outlive destructors
    return *only;
}

bool PromisingLayer::is_quiet() {
    const std::lock_guard<std::mutex> guard(layers_lock());
    if (quiet_ == 0)
        return false;
    quiet_--;
    return true;
}

// As all why_not(): null if it can be promised.
const char *PromisingLayer::why_not_now(bool dy_fits) {
    if (is_quiet())
        return "the gradient was looked at";
    if (c10::impl::TorchDispatchModeTLS::any_modes_set())
        return "a mode looks at operators";
    if (addresses_are_noted())
        return "a profiler looks at the memory of tensors";
    return dy_fits ? nullptr : kFactors;
}

const char *PromisingLayer::why_not(const at::Tensor &dy, const at::Tensor &x, const Whole &whole) {
    if (!is_factor(x) || dy.scalar_type() != x.scalar_type() || dy.size(0) != x.size(0))
        return kFactors;
    if (is_cast_by_autocast(x.scalar_type()))
        return "autocast is on in backward";
    if (x.element_size() == 2 && !at::globalContext().userEnabledMkldnn())
        return "panels of 16 bits are oneDNN's, which is off";
    switch (try_panels(dy, x, forced_, whole)) {
    case Verdict::UNTRIED:
        return "the shape waits for its trial";
    case Verdict::DIFFERENT:
        return "panels have other bits here";
    case Verdict::SLOWER:
        return "panels are slower here";
    case Verdict::EQUAL:
        return nullptr;
    }
    return nullptr;
}

const char *PromisingLayer::why_not_rows(const at::Tensor &dy, const at::Tensor &indices,
                                         int64_t rows) {
    if (!forced_ && 2 * indices.numel() > rows)
        return "an embedding has few rows for so many tokens";
    return dy.numel() == 0 ? "there are no tokens" : nullptr;
}

void PromisingLayer::note_use(const char *why_not) {
    const std::lock_guard<std::mutex> guard(layers_lock());
    counts_.promised += why_not == nullptr;
    counts_.whole += why_not != nullptr;
    counts_.because = why_not == nullptr ? counts_.because : why_not;
}

at::Tensor PromisingLayer::promise(const at::Tensor &dy, const at::Tensor &x, const Whole &whole) {
    const char *why = why_not(dy, x, whole);
    note_use(why);
    if (why != nullptr)
        return {};
    return make_promise(std::make_shared<const LinearProduct>(dy, x), shared_from_this());
}

bool PromisingLayer::may_promise(const at::Tensor &dy, bool by_rows) {
    const bool is_real = dy.scalar_type() == at::kFloat || dy.scalar_type() == at::kDouble;
    const char *why = why_not_now(by_rows ? is_plain_memory(dy) && is_real : is_factor(dy));
    if (why != nullptr)
        note_use(why);
    return why == nullptr;
}

at::Tensor PromisingLayer::promise_rows(const at::Tensor &dy, const at::Tensor &indices,
                                        int64_t rows, int64_t padding) {
    const char *why = why_not_rows(dy, indices, rows);
    note_use(why);
    if (why != nullptr)
        return {};
    const PlainMode plain;
    const at::Tensor tokens = dy.reshape({-1, dy.size(-1)});
    return make_promise(std::make_shared<const EmbeddingProduct>(tokens, indices, rows, padding),
                        shared_from_this());
}

void PromisingLayer::note(bool was_looked_at) {
    looked_at_ = (looked_at_ << 1 | (was_looked_at ? 1u : 0u)) & kLast;
    if (__builtin_popcount(looked_at_) < kTooMany || forced_)
        return;
    looked_at_ = 0;
    quiet_ = next_quiet_;
    next_quiet_ *= 2;
}

bool PromisingLayer::takes(const WeightProduct &sum) const {
    return forced_ || 2 * sum.factor_bytes() <= sum.nbytes();
}

void PromisingLayer::note_added() {
    const std::lock_guard<std::mutex> guard(layers_lock());
    counts_.promised -= counts_.promised != 0;
}

void PromisingLayer::note_panels() {
    const std::lock_guard<std::mutex> guard(layers_lock());
    counts_.panels++;
    note(false);
}

void PromisingLayer::note_made() {
    const std::lock_guard<std::mutex> guard(layers_lock());
    counts_.made++;
    note(true);
}

} // namespace optfuse
