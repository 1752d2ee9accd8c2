// SPDX-License-Identifier: BSD-3-Clause
// usual.cpp: collect(): what one update needs, for most parameters: those of a rule or a program
// with kernels whose tensors are dense, laid out alike and alone in memory that PyTorch has
// allocated. Where a model is many small tensors, the checks take longer than the updates; here one
// comparison with the parameter answers several of them. collect.cpp has the others.
#include <c10/core/TensorOptions.h>

#include <new>

#include "absent/awaited.h"
#include "base/compat.h"
#include "base/device.h"
#include "base/error.h"
#include "gpu/collect.h"
#include "host/host.h"
#include "memory/gradient.h"
#include "memory/memory.h"
#include "plan/plan.h"
#include "plan/references.h"
#include "plan/refuse.h"
#include "plan/scalars.h"

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
        : p(of), dtype(p->dtype()), bytes(dtype.itemsize()), sizes(p->sizes()),
          strides(p->strides()), begin(bytes * static_cast<size_t>(p->storage_offset())) {}
    const c10::TensorImpl *const p;
    const caffe2::TypeMeta dtype;
    const size_t bytes; // of an element
    const c10::IntArrayRef sizes, strides;
    const size_t begin; // in its memory, in bytes

    [[gnu::always_inline]] bool is_beside(const c10::TensorImpl *impl) const {
        const auto keys = on_gpu ? marked_keys(p) : kUsualKeys;
        return marked_keys(impl) == keys && storage_of(impl) != nullptr &&
               (!on_gpu || impl->device() == p->device());
    }
    // *offset: where it begins in its memory, in bytes.
    [[gnu::always_inline]] bool is_like(const c10::TensorImpl *impl, size_t *offset) const {
        if (!is_beside(impl) || impl->dtype() != dtype)
            return false;
        const c10::IntArrayRef its_sizes = impl->sizes(), its_strides = impl->strides();
        *offset = bytes * static_cast<size_t>(impl->storage_offset());
        const size_t n = sizes.size();
        if (its_sizes.size() != n)
            return false;
        for (size_t i = 0; i < n; i++)
            if (its_sizes[i] != sizes[i] || its_strides[i] != strides[i])
                return false;
        return true;
    }
};

// False: there is no kernel, or the inputs have come again for a parameter that is another one by
// now.
bool fill_in_kind(const c10::TensorImpl *p, of_inputs *in) {
    if (in->again)
        return in->numel == p->numel() &&
               p->dtype() == caffe2::TypeMeta::fromScalarType(type_of(in->dtype));
    in->numel = p->numel();
    return dtype_of(p, &in->dtype);
}

// Kernels run its program, which reads the gradient only.
[[gnu::noinline]] bool has_usual_program(const Slot *slot) {
    return slot->program && !is_by_host(slot) && !writes_gradient(slot);
}

// Nobody has asked for more than an update of its parameter, which has memory.
bool is_usual_slot(const Slot *slot, const c10::TensorImpl *p, of_dtype dtype) {
    const Plan *plan = slot->plan;
    const of_rule *rule = plan->rule;
    return storage_of(p) != nullptr && (!rule->runs_programs || has_usual_program(slot)) &&
           rule->n_counters == 0 && !plan->scalars->scale_gradients() && !slot->reduced &&
           (slot->tried == ANYWHERE || is_tried(slot, p, dtype));
}

// After this no other update is pending on them.
[[gnu::always_inline]] inline void launch_marked(c10::TensorImpl *impl,
                                                 decltype(&of_access) launch) {
    if (has_mark(impl))
        launch_others(impl, launch);
}

// The tensors that take part: the parameter, its gradient, the state that is used, and on a GPU
// perhaps the step counter. Their memory is in of_inputs.keys.
constexpr size_t PARAM = 0, GRAD = 1, STATE = 2;
struct Parts {
    c10::TensorImpl *at[OF_MAX_KEYS];
    // Puts one there once nothing is pending on it. offset: in bytes. Returns the address.
    [[gnu::always_inline]] void *put(size_t i, c10::TensorImpl *impl, of_inputs *in,
                                     size_t offset) {
        c10::StorageImpl *const storage = storage_of(impl);
        at[i] = impl;
        in->keys[i] = storage;
        return static_cast<char *>(address(storage)) + offset;
    }
};

// Whether the part's memory is that of no part between it and the parameter.
[[gnu::always_inline]] inline bool is_apart(const of_inputs *in, size_t part,
                                            const c10::TensorImpl *impl) {
    for (size_t i = GRAD; i < part; i++)
        if (in->keys[i] == storage_of(impl))
            return false;
    return true;
}

// is_known: it is no part of the update, see Special::shared_grad.
template <bool on_gpu>
[[gnu::always_inline]] inline bool put_gradient(c10::TensorImpl *g, const Yardstick<on_gpu> &like,
                                                bool is_known, of_inputs *in, Parts *parts) {
    size_t offset;
    if (!like.is_like(g, &offset) || is_any_on_its_way() ||
        (has_mark(g) && (on_gpu || absent_of(storage_of(g)) != nullptr)))
        return false;
    if (has_mark(g) && of_any_pending()) // else its mark is an old one
        launch_others(g, of_launch_at);  // a scaling stays pending: the update applies its factor
    if (is_known) {
        in->grad_key = nullptr;
        in->grad = static_cast<char *>(address(storage_of(g))) + offset;
        return true;
    }
    if (!is_private(storage_of(g), 0) || !(in->in_backward || is_held_once(g)))
        return false;
    in->grad_key = storage_of(g);
    in->grad = parts->put(GRAD, g, in, offset);
    return true;
}

// No part of its caller, who has more on hand than there are registers.
template <bool on_gpu>
[[gnu::noinline]] bool put_state(size_t part, c10::TensorImpl *s, const Yardstick<on_gpu> &like,
                                 of_inputs *in, void **address, Parts *parts) {
    size_t offset;
    if (!like.is_like(s, &offset))
        return false;
    launch_marked(s, of_access);
    if (!is_own(storage_of(s)) || !is_apart(in, part, s))
        return false;
    *address = parts->put(part, s, in, offset);
    return true;
}

// A counter on the GPU takes part.
[[gnu::noinline]] bool put_step_on_gpu(size_t part, c10::TensorImpl *step,
                                       const Yardstick<true> &like, of_inputs *in, Parts *parts) {
    if (!like.is_beside(step) || step->dtype().toScalarType() != c10::ScalarType::Float)
        return false;
    launch_marked(step, of_access);
    if (!is_own(storage_of(step)) || !is_apart(in, part, step))
        return false;
    const size_t offset = sizeof(float) * static_cast<size_t>(step->storage_offset());
    in->step_at = static_cast<float *>(parts->put(part, step, in, offset));
    in->count.step = 1; // a GPU counts for itself
    return true;
}

template <bool on_gpu>
[[gnu::always_inline]] inline bool find_step(const Slot *slot, const Yardstick<on_gpu> &like,
                                             of_inputs *in, Parts *parts, size_t *n) {
    if (!slot->plan->rule->counts) {
        in->count.step = slot->first ? 1 : 2;
        return true;
    }
    c10::TensorImpl *step = slot->step.unsafeGetTensorImpl();
    if (marked_keys(step) == kUsualKeys && storage_of(step) != nullptr) {
        if (!is_own(storage_of(step)))
            return false;
        in->count.step = number_after(step);
        return true;
    }
    if constexpr (on_gpu)
        return put_step_on_gpu((*n)++, step, like, in, parts);
    return false;
}

[[gnu::noinline]] void take_gradient(References *refs, c10::TensorImpl *g) {
    refs->consumes = true;
    refs->param = reference_to(refs->tensors[PARAM]);
    refs->grad = g;
}

// Whether the state of an update without a gradient among its parts is in the gradient's memory.
[[gnu::noinline]] bool has_state_at(const of_inputs *in, size_t n, const c10::TensorImpl *g) {
    for (size_t i = GRAD; i < n; i++)
        if (in->keys[i] == storage_of(g))
            return true;
    return false;
}

// All that can fail has been done.
[[gnu::noinline, gnu::flatten]] void take(const Parts &parts, size_t n, Slot *slot,
                                          c10::TensorImpl *g, of_inputs *in) {
    auto *refs = new (in->references) References;
    refs->slot = slot;
    refs->storages.begin_with(n, [&](size_t i) {
        refs->tensors[i] = parts.at[i];
        c10::StorageImpl *const storage = storage_of(parts.at[i]);
        if (storage == nullptr)
            __builtin_unreachable(); // its memory has been looked at
        return c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
    });
    in->n_keys = refs->n = n;
    if (slot->gradient_is_known)
        refs->make_special().shared_grad = reference_to(g);
    if (in->in_backward)
        take_gradient(refs, g);
}

// The state that the update uses, a bit each.
unsigned used_by(const Slot *slot, const of_inputs *in) {
    return slot->plan->rule->runs_programs ? slot->program->state() : in->used;
}

// Each update may be of another program: such inputs do not come again.
[[gnu::noinline]] void take_program(const Slot *slot, of_inputs *in) {
    static_cast<References *>(in->references)->program = slot->program;
    in->program = &slot->program->core;
}

// The parameter has usual keys. False: nothing is taken, and *in is of no use.
template <bool on_gpu>
[[gnu::always_inline]] inline bool take_all(Slot *slot, c10::TensorImpl *p, c10::TensorImpl *g,
                                            of_inputs *in) {
    if (!fill_in_kind(p, in) || !is_usual_slot(slot, p, in->dtype) ||
        !p->is_non_overlapping_and_dense())
        return false;
    const Yardstick<on_gpu> like(p);
    Parts parts;
    launch_marked(p, of_access);
    if (!is_private(storage_of(p), slot->aliases.size()))
        return false;
    const bool is_known = slot->gradient_is_known;
    in->param = parts.put(PARAM, p, in, like.begin);
    if (!put_gradient(g, like, is_known, in, &parts))
        return false;
    size_t n = is_known ? GRAD : STATE, i = 0;
    for (unsigned left = used_by(slot, in); left != 0; left >>= 1, i++)
        if ((left & 1u) != 0 &&
            !put_state(n++, slot->state[i].unsafeGetTensorImpl(), like, in, &in->state[i], &parts))
            return false;
    if (!find_step(slot, like, in, &parts, &n) || (is_known && has_state_at(in, n, g)))
        return false;
    take(parts, n, slot, g, in);
    if (slot->plan->rule->runs_programs)
        take_program(slot, in);
    return true;
}

// Sees to the GPU and its stream, too; false, with nothing taken: collect_gpu() refuses.
[[gnu::noinline]] bool collect_on_gpu(Slot *slot, c10::TensorImpl *p, c10::TensorImpl *g,
                                      of_inputs *in) {
    if (in->again || marked_keys(p) != usual_keys_on_gpu() || !take_all<true>(slot, p, g, in))
        return false;
    auto *refs = static_cast<References *>(in->references);
    try {
        if (prepare_gpu(slot, p, in->dtype, false) == OF_FOUND_INPUTS &&
            collect_gpu(slot, p, in, refs) == OF_FOUND_INPUTS)
            return true;
    } catch (...) {
        refs->~References();
        throw;
    }
    refs->~References();
    return false;
}

// False, with nothing taken and *in of no use: something is special about one of the tensors. May
// launch what is pending on them; throws where that fails.
bool collect_usual(Slot *slot, const at::Tensor &grad, of_inputs *in) {
    c10::TensorImpl *p = slot->param, *g = grad.unsafeGetTensorImpl();
    if (marked_keys(p) != kUsualKeys)
        return collect_on_gpu(slot, p, g, in);
    if (!take_all<false>(slot, p, g, in))
        return false;
    in->again = in->program == nullptr;
    return true;
}

of_found look_up(Plan *plan, Slot *slot, of_inputs *in) {
    const at::Tensor &grad = gradient_of(slot->param);
    if (!grad.defined())
        return OF_FOUND_NOTHING;
    return collect_usual(slot, grad, in) ? OF_FOUND_INPUTS : collect_special(plan, slot, grad, in);
}

} // namespace

[[gnu::flatten]] of_found collect(void *ctx, void *tensor, of_inputs *in) {
    Slot *slot = static_cast<Slot *>(tensor);
    return attempt("preparing the update of ", slot->label, OF_FOUND_ERROR,
                   [&] { return look_up(static_cast<Plan *>(ctx), slot, in); });
}

} // namespace optfuse
