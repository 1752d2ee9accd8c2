// SPDX-License-Identifier: BSD-3-Clause
// host.cpp: the core's host over libtorch. Functions in the order of an
// update's life: collect (collect.cpp), commit, defer, settle, release. None
// of these can fail.
#include <ATen/Version.h>
#include <ATen/record_function.h>

#include <memory>
#include <string>
#include <utility>

#include "base/compat.h"
#include "base/device.h"
#include "base/mkl.h"
#include "base/parallel.h"
#include "base/plain_mode.h"
#include "guard.h"
#include "host/first_use.h"
#include "host/host.h"
#include "memory/memory.h"
#include "memory/written.h"
#include "plan/plan.h"
#include "plan/references.h"
#include "plan/refuse.h"
#include "python/log.h"

namespace optfuse {

namespace {

// Tells the allocator that a stream uses the memory: the memory's owner does not know of a launch
// that comes late. A gradient that dies behind the update is the stream's where it was ready, which
// waits for the launch before the core lets go of it.
void record_all(References *refs) {
    const OnGpu &on = *refs->on_gpu;
    const c10::StorageImpl *grad = refs->consumes ? storage_of(refs->grad) : nullptr;
    for (size_t i = 0; i < refs->n; i++)
        if (refs->storages[i].get() != grad)
            record_on_stream(refs->storages[i].get(), on.stream);
    for (const at::Tensor &scalar : on.scalars)
        if (scalar.defined())
            record_on_stream(storage_of(scalar.unsafeGetTensorImpl()), on.stream);
}

References *references_of(void *refs) {
    return static_cast<References *>(refs);
}

// Memory that is about to be written past the dispatcher, from an element on.
template <class Number> Number *number_at(const c10::TensorImpl *impl) {
    return static_cast<Number *>(written_memory(storage_of(impl))) + impl->storage_offset();
}

void advance_step(Slot *slot) {
    slot->first = false;
    if (!slot->step.defined())
        return;
    c10::TensorImpl *impl = slot->step.unsafeGetTensorImpl();
    impl->bump_version();
    if (!impl->is_cpu())
        return; // counted by the launch
    if (impl->dtype().toScalarType() == c10::ScalarType::Double)
        *number_at<double>(impl) += 1;
    else
        *number_at<float>(impl) += 1;
}

void write_number(const c10::TensorImpl *impl, bool single, double number) {
    if (single)
        *number_at<float>(impl) = static_cast<float>(number);
    else
        *number_at<double>(impl) = number;
}

[[gnu::noinline]] void write_counters(const Slot *slot, const of_count &count) {
    for (size_t i = 0; i < slot->plan->rule->n_counters; i++) {
        c10::TensorImpl *impl = slot->counters[i].unsafeGetTensorImpl();
        if (!is_gpu(impl->device())) // else the launch does it
            write_number(impl, count.single, count.counters[i]);
        impl->bump_version();
    }
}

[[gnu::noinline]] void fill_stand_ins(const Special &special) {
    PlainMode plain;
    for (const auto &[tensor, copy] : special.stand_ins)
        copy.copy_(tensor);
}

void commit(void *, of_inputs *in) {
    References *refs = references_of(in->references);
    advance_step(refs->slot);
    if (refs->slot->plan->rule->n_counters != 0)
        write_counters(refs->slot, in->count);
    if (OF_GUARD(version))
        refs->slot->param->bump_version();
    refs->committed = true;
    if (refs->special && !refs->special->stand_ins.empty())
        fill_stand_ins(*refs->special);
}

// Whether nobody else holds the storages of its parts: the parameter's comes first.
bool are_private(const References *refs) {
    bool are = is_private(refs->storages[0].get(), 1 + refs->slot->aliases.size());
    for (size_t i = 1; are && i < refs->n; i++) {
        c10::StorageImpl *part = refs->storages[i].get();
        are = is_private(part, part == refs->slot->counted.unsafeGetStorageImpl() ? 2 : 1);
    }
    return are;
}

// A tensor that is used in the place of a local tensor, or beside it, launches the update, too; and
// so does a gradient that is no part of it.
[[gnu::noinline]] void mark_stands(References *refs) {
    Slot *slot = refs->slot;
    const c10::StorageImpl *key = refs->storages[0].get();
    Special &special = refs->make_special();
    special.proxies.reserve(2);
    if (special.shared_grad.defined() && OF_GUARD(bucket)) {
        c10::TensorImpl *grad = special.shared_grad.unsafeGetTensorImpl();
        special.proxies.push_back(storage_of(grad));
        mark(grad);
    }
    if (!slot->wrappers.empty() && OF_GUARD(wrapper)) {
        for (const at::Tensor &alias : slot->aliases)
            mark(alias.unsafeGetTensorImpl());
        for (c10::TensorImpl *wrapper : slot->wrappers)
            mark(wrapper);
        if (slot->wrapped != key) {
            const Proxies wrappers(slot->wrappers.begin(), slot->wrappers.end());
            remove_proxies(slot->wrapped, wrappers);
            add_proxies(slot->wrapped = key, wrappers);
        }
        if (slot->gradient_wrapper != nullptr) {
            special.proxies.push_back(slot->gradient_wrapper);
            mark(slot->gradient_wrapper);
        }
    }
    if (!special.proxies.empty())
        add_proxies(key, special.proxies);
}

// Another thread may make an alias between the look at who holds the memory and the marks, since
// neither waits for the other. The alias has no mark then; but the memory is sealed, so that whoever
// reads it by that alias before the launch gets PyTorch's error, and never an old number.
bool defer(void *, void *opaque) {
    References *refs = references_of(opaque);
    if (OF_GUARD(privacy) && !are_private(refs))
        return false;
    if (refs->special || !refs->slot->wrappers.empty())
        mark_stands(refs);
    for (size_t i = 0; i < refs->n; i++) {
        if (OF_GUARD(key))
            mark(refs->tensors[i]);
        if (OF_GUARD(seal))
            seal(refs->storages[i].get());
    }
    return true;
}

// The average is one more part of the update. The core has entered its key.
void defer_average(void *, void *opaque, void *opaque_average) {
    References *refs = references_of(opaque);
    const auto *deferred = static_cast<const DeferredAverage *>(opaque_average);
    c10::TensorImpl *impl = deferred->average.unsafeGetTensorImpl();
    refs->behind.emplace(Behind{deferred->average, deferred->program});
    const size_t part = refs->n++;
    refs->tensors[part] = impl;
    refs->storages.put(part, c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage_of(impl)));
    if (OF_GUARD(key))
        mark(impl);
    if (OF_GUARD(seal))
        seal(storage_of(impl));
}

// A mark that stays has the next use look for an update in vain; one of another update, in memory
// that the tensor got since, has to stay.
void unmark_if_its(c10::TensorImpl *impl, const c10::StorageImpl *storage) {
    if (storage_of(impl) == storage)
        unmark(impl);
}

// The slot's tensors live; others of the update may have been freed. The gradient's mark stays, since
// a scaling may be pending on it.
void take_marks_off(const References *refs) {
    const Slot *slot = refs->slot;
    const size_t n_state = slot->plan->rule->n_state, n = refs->n;
    unmark_if_its(slot->param, refs->storages[0].get());
    for (size_t i = 0, behind = 1; i < n_state; i++) { // parts are in the order of the state
        size_t part = behind;
        while (part < n && refs->tensors[part] != slot->state[i].unsafeGetTensorImpl())
            part++;
        if (part == n)
            continue;
        unmark_if_its(refs->tensors[part], refs->storages[part].get());
        behind = part + 1;
    }
    if (refs->behind)
        unmark_if_its(refs->behind->average.unsafeGetTensorImpl(),
                      refs->storages[refs->n - 1].get());
}

void begin_settling(void *ctx) {
    auto *plan = static_cast<Plan *>(ctx);
    plan->takes_marks_off = may_take_marks_off(plan);
}

void lift_seals(const References *refs) {
    const bool some_scaled = of_any_scaled();
    for (size_t i = 0; i < refs->n; i++) {
        c10::StorageImpl *storage = refs->storages[i].get();
        if (!(some_scaled && of_is_scaled(storage)) && // else the gradient stays pending
            absent_of(storage) == nullptr)             // or nobody has computed it yet
            unseal(storage);
    }
}

// The end of the pass writes it, and a hook may drop the counter before.
void keep_counter(References *refs) {
    Slot *slot = refs->slot;
    if (step_is_on_gpu(slot))
        refs->on_gpu->old_counted = std::exchange(slot->counted, slot->step.storage());
}

} // namespace

void settle(void *, void *opaque, bool was_deferred) {
    References *refs = references_of(opaque);
    if (was_deferred)
        lift_seals(refs);
    if (was_deferred && !refs->on_gpu && refs->slot->plan->takes_marks_off)
        take_marks_off(refs);
    else if (refs->behind)
        refs->slot->marked_average = WeakTensor(refs->behind->average.getIntrusivePtr());
    if (!refs->on_gpu || (!was_deferred && !refs->consumes))
        return;
    if (was_deferred)
        record_all(refs);
    if (refs->consumes) // the gradient dies behind the update, not with its owner
        record_on_stream(storage_of(refs->grad), refs->on_gpu->ready);
    keep_counter(refs);
}

namespace {

// Without commit() there was no update, and nothing is in the copies.
[[gnu::noinline]] void end_special(const References *refs) {
    const Special &special = *refs->special;
    if (refs->committed && special.n_written != 0 && OF_GUARD(copyback)) {
        PlainMode plain;
        for (size_t i = 0; i < special.n_written; i++)
            special.stand_ins[i].first.copy_(special.stand_ins[i].second);
    }
    remove_proxies(refs->storages[0].get(), special.proxies);
}

void release(void *, void *opaque) {
    References *refs = references_of(opaque);
    if (refs->special)
        end_special(refs);
    const SteadyStreams not_here(false); // what dies may have finalizers
    refs->~References();
}

void drop(void *, void *tensor) {
    delete static_cast<Slot *>(tensor);
}

void parallel_for(void *, int64_t n, void (*fn)(void *, int64_t, int64_t), void *arg) {
    in_parallel(n, 1, [&](int64_t begin, int64_t end) {
        const SerialMkl alone;
        fn(arg, begin, end);
    });
}

int threads(void *) {
    return thread_count();
}

std::string range_name(const Slot *slot, size_t n) {
    const std::string others = n == 1 ? "" : " and " + std::to_string(n - 1) + " more";
    return std::string("optfuse::") + slot->plan->rule->name + " " + slot->label + others;
}

// A range in the profiler's trace, as CUDA launches have one.
void *watch(void *, const void *references, size_t n) {
    if (!at::hasCallbacks())
        return nullptr;
    auto range = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
    if (!range->isActive())
        return nullptr;
    range->before(range_name(static_cast<const References *>(references)->slot, n));
    return range.release();
}

void unwatch(void *, void *watched) {
    delete static_cast<at::RecordFunction *>(watched);
}

} // namespace

of_host make_host(Plan *plan) {
    of_host host = {};
    host.abi_version = OF_ABI_VERSION;
    host.struct_size = sizeof(of_host);
    host.ctx = plan;
    host.reference_bytes = sizeof(References);
    host.collect = collect;
    host.prefetch = prefetch;
    host.commit = commit;
    host.defer = defer;
    host.defer_average = defer_average;
    host.begin_settling = begin_settling;
    host.settle = settle;
    host.unseal = [](void *, void *opaque) { lift_seals(references_of(opaque)); };
    host.release = release;
    host.drop = drop;
    host.parallel_for = parallel_for;
    host.threads = threads;
    host.watch = watch;
    host.unwatch = unwatch;
    host.log = of_log_function();
    host.square_roots[0] = square_roots_of_floats;
    host.square_roots[1] = square_roots_of_doubles;
    host.gpu = &gpu_functions;
    host.external = &external_host;
    return host;
}

void fill_reference(of_plan_options *options) {
    const std::string capability = at::get_cpu_capability();
#ifdef __aarch64__
    // NEON has fused multiply-adds, too; ATen's vectors of SVE fuse those that it spells out.
    const bool is_wide = capability == "SVE256";
    options->reference = is_wide ? OF_REF_CPU_FUSED_PLAIN : OF_REF_CPU_FUSED;
    options->vector_bytes = is_wide ? 32 : 16;
#else
    options->reference = capability == "DEFAULT" || capability == "NO AVX" ? OF_REF_CPU_FUSED_PLAIN
                                                                           : OF_REF_CPU_FUSED;
#endif
}

} // namespace optfuse
