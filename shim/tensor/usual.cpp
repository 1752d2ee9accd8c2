// SPDX-License-Identifier: BSD-3-Clause
// usual.cpp: collect() for most parameters. Where a model is many small tensors, its checks take
// longer than the updates; here one comparison with the parameter answers several of them.
#include "tensor/usual.h"

#include <c10/core/TensorOptions.h>

#include <new>

#include "compat.h"
#include "gpu/device.h"
#include "gpu/place.h"
#include "plan.h"
#include "tensor/await.h"
#include "tensor/host.h"
#include "tensor/memory.h"
#include "tensor/references.h"
#include "tensor/refuse.h"

namespace optfuse {
namespace {

// Those of a tensor as PyTorch makes one on the CPU, and our mark. A subclass, a sparse, negated or
// zero tensor and one of inference mode have others.
constexpr c10::DispatchKeySet kUsualKeys({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU,
                                          c10::DispatchKey::AutocastCPU,
                                          c10::DispatchKey::ADInplaceOrView, kPendingKey});

// And on a GPU.
[[gnu::noinline]] c10::DispatchKeySet usual_keys_on_gpu() {
    static const c10::DispatchKeySet keys = [] {
        const c10::DispatchKey dense = c10::computeDispatchKey(
            c10::ScalarType::Float, c10::kStrided, c10::Device(gpu_type()));
        const c10::BackendComponent gpu = c10::toBackendComponent(dense);
        return (c10::DispatchKeySet(dense) | c10::getAutocastRelatedKeySetFromBackend(gpu) |
                c10::getAutogradRelatedKeySetFromBackend(gpu))
            .add(kPendingKey);
    }();
    return keys;
}

c10::DispatchKeySet marked_keys(const c10::TensorImpl *impl) {
    return impl->key_set().add(kPendingKey);
}

// A parameter, as its other tensors are compared with it.
template <bool on_gpu> struct Yardstick {
    explicit Yardstick(const c10::TensorImpl *of)
        : p(of), dtype(p->dtype()), sizes(p->sizes()), strides(p->strides()) {}
    const c10::TensorImpl *const p;
    const caffe2::TypeMeta dtype;
    const c10::IntArrayRef sizes, strides;

    [[gnu::always_inline]] bool is_beside(const c10::TensorImpl *impl) const {
        const auto keys = on_gpu ? marked_keys(p) : kUsualKeys;
        return marked_keys(impl) == keys && storage_of(impl) != nullptr &&
               (!on_gpu || impl->device() == p->device());
    }
    [[gnu::always_inline]] bool lies_like_it(const c10::TensorImpl *impl) const {
        const c10::IntArrayRef its_sizes = impl->sizes(), its_strides = impl->strides();
        bool same = its_sizes.size() == sizes.size();
        for (size_t i = 0; same && i < sizes.size(); i++)
            same = its_sizes[i] == sizes[i] && its_strides[i] == strides[i];
        return same;
    }
    [[gnu::always_inline]] bool is_like(const c10::TensorImpl *impl) const {
        return is_beside(impl) && impl->dtype() == dtype && lies_like_it(impl);
    }
};

// Nobody has asked for more than an update of its parameter, which has memory.
bool is_usual_slot(const Slot *slot, of_dtype *dtype) {
    const Plan *plan = slot->plan;
    const of_rule *rule = plan->rule;
    const c10::TensorImpl *p = slot->param;
    return storage_of(p) != nullptr && dtype_of(p, dtype) && !rule->external &&
           !rule->runs_programs && rule->n_counters == 0 && !plan->scalars.scale_gradients() &&
           slot->aliases.empty() && !slot->gradient_is_known && !slot->reduced &&
           (slot->tried == ANYWHERE || is_tried(slot, p, *dtype));
}

double number_of_update(const Slot *slot) {
    if (!slot->plan->rule->counts)
        return slot->first ? 1 : 2;
    const c10::TensorImpl *step = slot->step.unsafeGetTensorImpl();
    return marked_keys(step) == kUsualKeys ? number_after(step) : 1; // a GPU counts for itself
}

// After this no other update is pending on them.
[[gnu::always_inline]] inline void launch_marked(c10::TensorImpl *impl,
                                                 decltype(&of_access) launch) {
    if (has_mark(impl))
        launch_others(impl, launch);
}

template <bool on_gpu>
[[gnu::always_inline]] inline bool is_usual_gradient(c10::TensorImpl *g, bool in_backward,
                                                     const Yardstick<on_gpu> &like) {
    if (!like.is_like(g) || is_promise(g) || is_any_on_its_way() || (on_gpu && has_mark(g)))
        return false;
    if (of_any_pending()) // else its mark is an old one
        launch_marked(g, of_launch_at); // a scaling stays pending: the update applies its factor
    return is_private(storage_of(g), 0) && (in_backward || is_held_once(g));
}

template <bool on_gpu>
[[gnu::always_inline]] inline bool is_usual_state(c10::TensorImpl *s,
                                                  const Yardstick<on_gpu> &like) {
    if (!like.is_like(s))
        return false;
    launch_marked(s, of_access);
    return is_own(storage_of(s));
}

// The tensors that take part: the parameter, its gradient, the state that is used, and on a GPU
// perhaps the step counter.
struct Parts {
    static constexpr size_t PARAM = 0, GRAD = 1, STATE = 2;
    c10::TensorImpl *at[STATE + OF_MAX_STATE + 1];
    size_t n = STATE;
    // False: another one has its memory.
    [[gnu::always_inline]] bool add(c10::TensorImpl *s) {
        for (size_t i = GRAD; i < n; i++)
            if (storage_of(at[i]) == storage_of(s))
                return false;
        at[n++] = s;
        return true;
    }
};

// A counter on the GPU takes part.
[[gnu::noinline]] bool find_step_on_gpu(c10::TensorImpl *step, const Yardstick<true> &like,
                                        Parts *parts) {
    if (!like.is_beside(step) || step->dtype().toScalarType() != c10::ScalarType::Float)
        return false;
    launch_marked(step, of_access);
    return is_own(storage_of(step)) && parts->add(step);
}

template <bool on_gpu>
[[gnu::always_inline]] inline bool find_step(const Slot *slot, const Yardstick<on_gpu> &like,
                                             Parts *parts) {
    c10::TensorImpl *step = slot->step.unsafeGetTensorImpl();
    if (!slot->plan->rule->counts)
        return true;
    if (marked_keys(step) == kUsualKeys && storage_of(step) != nullptr)
        return is_own(storage_of(step));
    if constexpr (on_gpu)
        return find_step_on_gpu(step, like, parts);
    return false;
}

// The parameter has usual keys.
template <bool on_gpu>
[[gnu::always_inline]] inline bool find_usual(const Slot *slot, unsigned used, bool in_backward,
                                              Parts *parts) {
    c10::TensorImpl *p = parts->at[Parts::PARAM];
    const Yardstick<on_gpu> like(p);
    if (!p->is_non_overlapping_and_dense() ||
        !is_usual_gradient(parts->at[Parts::GRAD], in_backward, like))
        return false;
    for (size_t i = 0; i < slot->plan->rule->n_state; i++) {
        if ((used >> i & 1u) == 0)
            continue;
        c10::TensorImpl *s = slot->state[i].unsafeGetTensorImpl();
        if (!is_usual_state(s, like) || !parts->add(s))
            return false;
    }
    launch_marked(p, of_access);
    return is_private(storage_of(p), 0) && find_step(slot, like, parts);
}

[[gnu::always_inline]] inline void take(const Parts &parts, of_inputs *in, References *refs) {
    const size_t n = parts.n;
    refs->storages.begin_with(n, [&](size_t i) {
        c10::StorageImpl *storage = storage_of(parts.at[i]);
        refs->tensors[i] = parts.at[i];
        in->keys[i] = storage;
        return c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
    });
    in->n_keys = refs->n = n;
}

[[gnu::always_inline]] inline void fill_in_usual(Slot *slot, const Parts &parts, unsigned used,
                                                 of_inputs *in, References *refs) {
    c10::TensorImpl *p = parts.at[Parts::PARAM], *g = parts.at[Parts::GRAD];
    const size_t bytes = p->dtype().itemsize(); // of an element of each
    const auto data = [bytes](const c10::TensorImpl *impl) -> void * {
        return static_cast<char *>(address(storage_of(impl))) +
               bytes * static_cast<size_t>(impl->storage_offset());
    };
    refs->slot = slot;
    refs->consumes = in->in_backward;
    in->numel = p->numel();
    in->count.step = number_of_update(slot);
    in->param = data(p);
    in->grad = data(g);
    in->grad_key = storage_of(g);
    size_t part = Parts::STATE;
    for (size_t i = 0; i < slot->plan->rule->n_state; i++)
        if ((used >> i & 1u) != 0)
            in->state[i] = data(parts.at[part++]);
    if (part < parts.n)
        in->step_at = static_cast<float *>(data_of(parts.at[part]));
    take(parts, in, refs);
    if (refs->consumes) {
        refs->param = reference_to(p);
        refs->grad = g;
    }
}

[[gnu::noinline]] bool find_usual_on_gpu(const Slot *slot, unsigned used, bool in_backward,
                                         Parts *parts) {
    return find_usual<true>(slot, used, in_backward, parts);
}

// Sees to the GPU and its stream; false, with nothing taken: place() refuses.
[[gnu::noinline]] bool place_usual(Slot *slot, of_inputs *in, References *refs) {
    try {
        if (place(slot, slot->param, in, refs) == OF_FOUND_INPUTS)
            return true;
    } catch (...) {
        refs->~References();
        throw;
    }
    refs->~References();
    of_inputs none = {};
    none.references = in->references;
    none.in_backward = in->in_backward;
    *in = none;
    return false;
}

} // namespace

bool collect_usual(Slot *slot, c10::TensorImpl *p, const at::Tensor &grad, of_inputs *in) {
    const bool on_gpu = marked_keys(p) != kUsualKeys;
    if ((on_gpu && marked_keys(p) != usual_keys_on_gpu()) || !is_usual_slot(slot, &in->dtype))
        return false;
    const unsigned used = of_plan_state_used(slot->plan->core, slot->index);
    Parts parts;
    parts.at[Parts::PARAM] = p;
    parts.at[Parts::GRAD] = grad.unsafeGetTensorImpl();
    const bool found = on_gpu ? find_usual_on_gpu(slot, used, in->in_backward, &parts)
                              : find_usual<false>(slot, used, in->in_backward, &parts);
    if (!found || (on_gpu && prepare_gpu(slot, p, in->dtype, false) != OF_FOUND_INPUTS))
        return false;
    auto *refs = new (in->references) References;
    fill_in_usual(slot, parts, used, in, refs);
    return !on_gpu || place_usual(slot, in, refs);
}

} // namespace optfuse
