// SPDX-License-Identifier: BSD-3-Clause
// usual.cpp: collect() for most parameters. Where a model is many small tensors, its checks take
// longer than the updates; here one comparison with the parameter answers several of them.
#include "tensor/usual.h"

#include <new>

#include "compat.h"
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

bool has_usual_keys(const c10::TensorImpl *impl) {
    return impl->key_set().add(kPendingKey) == kUsualKeys && storage_of(impl) != nullptr;
}

bool is_own_memory(const c10::TensorImpl *impl) {
    return is_own(storage_of(impl)->_mutable_data_ptr_no_checks());
}

// A parameter, as its other tensors are compared with it.
struct Yardstick {
    explicit Yardstick(const c10::TensorImpl *p)
        : dtype(p->dtype()), sizes(p->sizes()), strides(p->strides()) {}
    const caffe2::TypeMeta dtype;
    const c10::IntArrayRef sizes, strides;
};

[[gnu::always_inline]] inline bool is_usual_like(const c10::TensorImpl *impl, const Yardstick &p) {
    return has_usual_keys(impl) && impl->dtype() == p.dtype && equal(impl->sizes(), p.sizes) &&
           equal(impl->strides(), p.strides);
}

// Nobody has asked for more than an update of its parameter.
bool is_usual_slot(const Slot *slot) {
    const Plan *plan = slot->plan;
    const of_rule *rule = plan->rule;
    return !rule->external && !rule->runs_programs && rule->n_counters == 0 &&
           !plan->scalars.scale_gradients() && slot->aliases.empty() && !slot->gradient_is_known &&
           !slot->reduced && slot->tried == ANYWHERE;
}

bool is_usual_step(const Slot *slot) {
    const c10::TensorImpl *step = slot->step.unsafeGetTensorImpl();
    return !slot->plan->rule->counts || (has_usual_keys(step) && is_own_memory(step));
}

double number_of_update(const Slot *slot) {
    if (slot->plan->rule->counts)
        return number_after(slot->step.unsafeGetTensorImpl());
    return slot->first ? 1 : 2;
}

// After this no other update is pending on them.
void launch_marked(c10::TensorImpl *impl, decltype(&of_access) launch) {
    if (has_mark(impl))
        launch_others(impl, launch);
}

bool is_usual_gradient(c10::TensorImpl *g, const Yardstick &p) {
    if (!is_usual_like(g, p) || is_promise(g) || is_any_on_its_way())
        return false;
    launch_marked(g, of_launch_at); // a scaling stays pending: the update applies its factor
    return is_private(storage_of(g), 0);
}

bool is_usual_state(c10::TensorImpl *s, const Yardstick &p) {
    if (!is_usual_like(s, p))
        return false;
    launch_marked(s, of_access);
    return is_own_memory(s);
}

// The parameter has usual keys; no two of the tensors may have one storage.
bool are_usual(const Slot *slot, c10::TensorImpl *p, c10::TensorImpl *g, unsigned used) {
    const Yardstick like(p);
    if (!p->is_non_overlapping_and_dense() || !is_usual_gradient(g, like))
        return false;
    const c10::StorageImpl *seen[OF_MAX_STATE + 1] = {storage_of(g)};
    size_t n = 1;
    for (size_t i = 0; i < slot->plan->rule->n_state; i++) {
        if ((used >> i & 1u) == 0)
            continue;
        c10::TensorImpl *s = slot->state[i].unsafeGetTensorImpl();
        if (!is_usual_state(s, like))
            return false;
        for (size_t j = 0; j < n; j++)
            if (seen[j] == storage_of(s))
                return false;
        seen[n++] = storage_of(s);
    }
    launch_marked(p, of_access);
    return is_private(storage_of(p), 0) && is_usual_step(slot);
}

void fill_in_usual(Slot *slot, c10::TensorImpl *p, const at::Tensor &grad, unsigned used,
                   of_inputs *in, References *refs) {
    c10::TensorImpl *g = grad.unsafeGetTensorImpl();
    refs->slot = slot;
    refs->consumes = in->in_backward;
    in->numel = p->numel();
    in->count.step = number_of_update(slot);
    in->param = data_of(p);
    take_part(refs, in, p);
    if (refs->consumes) {
        refs->param = reference_to(p);
        refs->grad = g;
    }
    in->grad = data_of(g);
    in->grad_key = storage_of(g);
    take_part(refs, in, g);
    for (size_t i = 0; i < slot->plan->rule->n_state; i++)
        if ((used >> i & 1u) != 0) {
            c10::TensorImpl *s = slot->state[i].unsafeGetTensorImpl();
            in->state[i] = data_of(s);
            take_part(refs, in, s);
        }
}

} // namespace

bool collect_usual(Slot *slot, c10::TensorImpl *p, const at::Tensor &grad, of_inputs *in) {
    const Plan *plan = slot->plan;
    if (!has_usual_keys(p) || !is_usual_slot(slot) || !dtype_of(p, &in->dtype))
        return false;
    const unsigned used = plan->rule->state_used(of_plan_hyper(plan->core, slot->index));
    if (!are_usual(slot, p, grad.unsafeGetTensorImpl(), used))
        return false;
    fill_in_usual(slot, p, grad, used, in, new (in->references) References);
    return true;
}

} // namespace optfuse
