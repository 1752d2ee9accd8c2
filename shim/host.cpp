// SPDX-License-Identifier: BSD-3-Clause
// host.cpp: the core's host over libtorch. Functions in the order of an
// update's life: collect, commit, defer, settle, release.
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/CPUAllocator.h>

#include "compat.h"
#include "guard.h"
#include "tensors.h"

namespace optfuse {
namespace {

Slot *slot_of(void *tensor) { return static_cast<Slot *>(tensor); }
Hold *hold_of(void *hold) { return static_cast<Hold *>(hold); }

bool dtype_of(const c10::TensorImpl *impl, of_dtype *out) {
    switch (impl->dtype().toScalarType()) {
    case c10::ScalarType::Float: *out = OF_FLOAT32; return true;
    case c10::ScalarType::Double: *out = OF_FLOAT64; return true;
    case c10::ScalarType::BFloat16: *out = OF_BFLOAT16; return true;
    case c10::ScalarType::Half: *out = OF_FLOAT16; return true;
    default: return false;
    }
}

c10::StorageImpl *storage_of(const c10::TensorImpl *impl) {
    return impl->unsafe_storage().unsafeGetStorageImpl();
}

void *data_of(const c10::TensorImpl *impl) {
    return static_cast<char *>(address(storage_of(impl))) +
           impl->dtype().itemsize() * static_cast<size_t>(impl->storage_offset());
}

// Only one tensor and `held` references of ours know this storage.
bool is_private(c10::StorageImpl *storage, size_t held) {
    static const c10::DeleterFnPtr own_deleter = c10::GetAllocator(c10::kCPU)->raw_deleter();
    const size_t users = c10::raw::intrusive_ptr::use_count(storage);
    const bool alone = users <= 1 + held ||
                       (users == 2 + held && idle_references(*storage) == 1);
    return alone &&
           storage->_mutable_data_ptr_no_checks().get_deleter() == own_deleter;
}

bool same_strides(const c10::TensorImpl *a, const c10::TensorImpl *b) {
    if (!OF_GUARD(dense))
        return true;
    const int64_t dim = a->dim();
    if (dim != b->dim())
        return false;
    const int64_t *sizes[] = {a->sizes().data(), b->sizes().data()};
    const int64_t *strides[] = {a->strides().data(), b->strides().data()};
    bool same = true;
    for (int64_t i = 0; i < dim; i++)
        same = same && sizes[0][i] == sizes[1][i] && strides[0][i] == strides[1][i];
    return same;
}

of_found refuse_gradient(const Slot *slot, const char *what, const std::string &detail) {
    of_set_error("the gradient of %s %s%s; nothing was updated", slot->label.c_str(), what,
                 detail.c_str());
    return OF_FOUND_ERROR;
}

of_found check_gradient(const Slot *slot, const c10::TensorImpl *p, const c10::TensorImpl *g) {
    if (g->layout() != c10::kStrided)
        return refuse_gradient(slot, "is sparse", ", which has no fused update: use a dense "
                                                  "gradient (sparse=False) or leave this "
                                                  "parameter to an optimizer of its own");
    if (g->key_set().has(c10::DispatchKey::Python))
        return refuse_gradient(slot, "is a tensor subclass", ", which optfuse does not support");
    if (g->device() != p->device())
        return refuse_gradient(slot, "is on another device: ", g->device().str());
    if (g->dtype() != p->dtype())
        return refuse_gradient(slot, "has another dtype: ", std::string(g->dtype().name()));
    if (g->sizes() != p->sizes())
        return refuse_gradient(slot, "has another shape", "");
    return OF_FOUND_INPUTS;
}

bool state_is_missing(const Slot *slot, unsigned used) {
    for (size_t i = 0; i < slot->plan->rule->n_state; i++)
        if ((used >> i & 1u) != 0 && !slot->state[i].defined())
            return true;
    return slot->plan->counts_steps && !slot->step.defined();
}

double step_number(const Slot *slot) {
    if (!slot->plan->counts_steps)
        return slot->first ? 1 : 2;
    const c10::TensorImpl *impl = slot->step.unsafeGetTensorImpl();
    const void *data = data_of(impl);
    return 1 + (impl->dtype().toScalarType() == c10::ScalarType::Double
                    ? *static_cast<const double *>(data)
                    : static_cast<double>(*static_cast<const float *>(data)));
}

void advance_step(Slot *slot) {
    slot->first = false;
    if (!slot->step.defined())
        return;
    c10::TensorImpl *impl = slot->step.unsafeGetTensorImpl();
    if (impl->dtype().toScalarType() == c10::ScalarType::Double)
        *static_cast<double *>(data_of(impl)) += 1;
    else
        *static_cast<float *>(data_of(impl)) += 1;
    impl->bump_version();
}

void take_part(Hold *hold, of_inputs *in, c10::TensorImpl *impl) {
    c10::StorageImpl *storage = storage_of(impl);
    hold->tensors[hold->n] = impl;
    hold->storages[hold->n] = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
    in->keys[hold->n] = storage;
    in->n_keys = ++hold->n;
}

// The gradient with the parameter's strides; a copy if it has others.
const void *gradient_data(Hold *hold, of_inputs *in, const c10::TensorImpl *p,
                          const at::Tensor &grad) {
    c10::TensorImpl *g = grad.unsafeGetTensorImpl();
    if (same_strides(p, g)) {
        take_part(hold, in, g);
        return data_of(g);
    }
    PlainMode plain;
    hold->copy = at::empty_strided(p->sizes(), p->strides(), grad.options());
    hold->copy.copy_(grad);
    return data_of(hold->copy.unsafeGetTensorImpl());
}

// Whether every state tensor can be updated in place, element by element.
of_found check_state(const Slot *slot, const c10::TensorImpl *p, const c10::TensorImpl *s) {
    if (s->dtype() == p->dtype() && s->device() == p->device() && s->sizes() == p->sizes() &&
        s->layout() == c10::kStrided)
        return OF_FOUND_INPUTS;
    of_set_error("the optimizer state of %s has another dtype, device or shape than the "
                 "parameter; load or create it to match. Nothing was updated",
                 slot->label.c_str());
    return OF_FOUND_ERROR;
}

of_found fill_in(Slot *slot, c10::TensorImpl *p, const at::Tensor &grad, unsigned used,
                 of_inputs *in, Hold *hold) {
    hold->slot = slot;
    hold->backward = slot->plan->mode == OF_BACKWARD;
    bool dense = p->is_non_overlapping_and_dense_or_false();
    for (size_t i = 0; i < slot->plan->rule->n_state; i++) {
        if ((used >> i & 1u) == 0)
            continue;
        c10::TensorImpl *s = slot->state[i].unsafeGetTensorImpl();
        if (check_state(slot, p, s) == OF_FOUND_ERROR)
            return OF_FOUND_ERROR;
        dense = dense && same_strides(p, s);
        in->state[i] = data_of(s);
    }
    in->numel = p->numel();
    in->device = OF_CPU;
    in->step = step_number(slot);
    in->param = data_of(p);
    take_part(hold, in, p);
    in->alone = !dense || !is_private(storage_of(p), 1);
    if (in->alone || hold->backward)
        hold->param = at::Tensor(
            c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(p));
    if (hold->backward)
        hold->grad = grad.unsafeGetTensorImpl();
    if (dense)
        in->grad = gradient_data(hold, in, p, grad);
    else
        hold->copy = grad;
    for (size_t i = 0; i < slot->plan->rule->n_state; i++)
        if ((used >> i & 1u) != 0)
            take_part(hold, in, slot->state[i].unsafeGetTensorImpl());
    return OF_FOUND_INPUTS;
}

// Another optimizer's update of the same parameter must be done before its
// memory is judged. Nothing is pending behind most marks.
void launch_others(const c10::TensorImpl *impl) {
    if (has_mark(impl))
        of_touch(storage_of(impl), false);
}

of_found collect(void *ctx, void *tensor, of_inputs *in) {
    Slot *slot = slot_of(tensor);
    c10::TensorImpl *p = slot->param;
    const at::Tensor &grad = p->grad();
    if (!grad.defined() || is_spent(grad.unsafeGetTensorImpl()))
        return OF_FOUND_NOTHING;
    if (check_gradient(slot, p, grad.unsafeGetTensorImpl()) == OF_FOUND_ERROR)
        return OF_FOUND_ERROR;
    if (!dtype_of(p, &in->dtype)) {
        of_set_error("%s has a dtype without a fused update; nothing was updated",
                     slot->label.c_str());
        return OF_FOUND_ERROR;
    }
    launch_others(p);
    launch_others(grad.unsafeGetTensorImpl());
    const Plan *plan = static_cast<Plan *>(ctx);
    const unsigned used = plan->rule->state_used(of_plan_hyper(plan->core, slot->index));
    if (state_is_missing(slot, used))
        return OF_FOUND_NEEDS_STATE;
    Hold *hold = new (in->hold) Hold;
    of_found found = OF_FOUND_ERROR;
    try {
        found = fill_in(slot, p, grad, used, in, hold);
    } catch (const c10::Error &e) {
        of_set_error("preparing the update of %s failed: %s", slot->label.c_str(),
                     e.what_without_backtrace());
    } catch (const std::exception &e) {
        of_set_error("preparing the update of %s failed: %s", slot->label.c_str(), e.what());
    }
    if (found != OF_FOUND_INPUTS)
        hold->~Hold();
    return found;
}

// A dense stand-in for a tensor with holes, overlaps or strides of its own.
void *dense_copy(Hold *hold, const at::Tensor &tensor) {
    at::Tensor copy = tensor.contiguous();
    if (copy.is_same(tensor))
        copy = tensor.clone();
    hold->back.emplace_back(tensor, copy);
    return data_of(copy.unsafeGetTensorImpl());
}

void commit(void *ctx, of_inputs *in) {
    Hold *hold = hold_of(in->hold);
    Slot *slot = hold->slot;
    advance_step(slot);
    if (OF_GUARD(version))
        slot->param->bump_version();
    if (in->grad != nullptr || in->numel == 0)
        return;
    PlainMode plain;
    hold->copy = hold->copy.contiguous();
    in->grad = data_of(hold->copy.unsafeGetTensorImpl());
    in->param = dense_copy(hold, hold->param);
    for (size_t i = 0; i < static_cast<Plan *>(ctx)->rule->n_state; i++)
        if (in->state[i] != nullptr)
            in->state[i] = dense_copy(hold, slot->state[i]);
}

bool defer(void *, void *opaque) {
    Hold *hold = hold_of(opaque);
    if (OF_GUARD(privacy))
        for (size_t i = 0; i < hold->n; i++)
            if (!is_private(hold->storages[i].get(), 1))
                return false;
    for (size_t i = 0; i < hold->n; i++) {
        if (OF_GUARD(key))
            mark(hold->tensors[i]);
        if (OF_GUARD(seal))
            seal(hold->storages[i].get());
    }
    return true;
}

bool can_reuse_spent(const at::Tensor &spent, const at::Tensor &param) {
    return spent.defined() && spent.use_count() == 1 && is_spent(spent.unsafeGetTensorImpl()) &&
           spent.sizes() == param.sizes() && spent.dtype() == param.dtype();
}

void spend_gradient(Hold *hold) {
    at::Tensor &grad = hold->param.mutable_grad();
    if (!grad.defined() || grad.unsafeGetTensorImpl() != hold->grad)
        return;
    hold->old_grad = std::move(grad);
    Slot *slot = hold->slot;
    if (!OF_GUARD(spent)) {
        grad = at::zeros_like(hold->old_grad);
        return;
    }
    if (!can_reuse_spent(slot->spent, hold->param)) {
        hold->old_spent = std::move(slot->spent);
        slot->spent = make_spent(hold->param);
    }
    grad = slot->spent;
}

void settle(void *, void *opaque, bool was_deferred) {
    Hold *hold = hold_of(opaque);
    if (was_deferred)
        for (size_t i = 0; i < hold->n; i++)
            unseal(hold->storages[i].get());
    if (hold->backward)
        spend_gradient(hold);
}

void release(void *, void *opaque) {
    Hold *hold = hold_of(opaque);
    if (!hold->back.empty() && OF_GUARD(copyback)) {
        PlainMode plain;
        for (auto &[tensor, copy] : hold->back)
            tensor.copy_(copy);
    }
    hold->~Hold();
}

void drop(void *, void *tensor) { delete slot_of(tensor); }

void parallel_for(void *, int64_t n, void (*fn)(void *, int64_t, int64_t), void *arg) {
    at::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) { fn(arg, begin, end); });
}

} // namespace

of_host make_host(Plan *plan) {
    of_host host = {};
    host.abi_version = OF_ABI_VERSION;
    host.struct_size = sizeof(of_host);
    host.ctx = plan;
    host.hold_bytes = sizeof(Hold);
    host.collect = collect;
    host.commit = commit;
    host.defer = defer;
    host.settle = settle;
    host.release = release;
    host.drop = drop;
    host.parallel_for = parallel_for;
    return host;
}

void fill_reference(of_plan_options *options) {
    const std::string capability = at::get_cpu_capability();
    options->reference = capability == "DEFAULT" || capability == "NO AVX" ? OF_REF_CPU_FUSED_PLAIN
                                                                           : OF_REF_CPU_FUSED;
}

} // namespace optfuse
