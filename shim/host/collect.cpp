// SPDX-License-Identifier: BSD-3-Clause
// collect.cpp: looks up what one update needs, whatever is special about its tensors (usual.cpp has
// the others). Nothing that a user can see changes here, and everything that can fail happens here.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <stdexcept>

#include <c10/core/DefaultDtype.h>

#include "absent/awaited.h"
#include "absent/consumed.h"
#include "base/compat.h"
#include "base/device.h"
#include "base/error.h"
#include "base/plain_mode.h"
#include "gpu/collect.h"
#include "guard.h"
#include "host/first_use.h"
#include "host/host.h"
#include "memory/gradient.h"
#include "memory/memory.h"
#include "memory/written.h"
#include "plan/overlap.h"
#include "plan/plan.h"
#include "plan/references.h"
#include "plan/refuse.h"
#include "plan/scalars.h"

namespace optfuse {
namespace {

// Whether tensors of the same sizes have the same strides.
bool same_strides(const c10::TensorImpl *a, const c10::TensorImpl *b) {
    return !OF_GUARD(dense) || equal(a->strides(), b->strides());
}

bool state_is_missing(const Slot *slot, unsigned used) {
    for (size_t i = 0; i < slot->plan->rule->n_state; i++)
        if ((used >> i & 1u) != 0 && !slot->state[i].defined())
            return true;
    for (size_t i = 0; i < slot->plan->rule->n_counters; i++)
        if (!slot->counters[i].defined())
            return true;
    return slot->plan->rule->counts && !slot->step.defined();
}

double step_number(const Slot *slot) {
    if (!slot->plan->rule->counts)
        return slot->first ? 1 : 2;
    // On a GPU the device counts for itself.
    return step_is_on_gpu(slot) ? 1 : number_after(slot->step.unsafeGetTensorImpl());
}

of_count count_of(const Slot *slot) {
    of_count count = {};
    count.step = step_number(slot);
    count.made_single = c10::get_default_dtype_as_scalartype() == c10::ScalarType::Float;
    if (counts_on_gpu(slot))
        return count; // the device reads them itself
    for (size_t i = 0; i < slot->plan->rule->n_counters; i++) {
        const c10::TensorImpl *impl = slot->counters[i].unsafeGetTensorImpl();
        count.single = impl->dtype().toScalarType() == c10::ScalarType::Float;
        count.counters[i] = count.single ? *static_cast<const float *>(data_of(impl))
                                         : *static_cast<const double *>(data_of(impl));
    }
    return count;
}

} // namespace

void launch_others(const c10::TensorImpl *impl, decltype(&of_access) launch) {
    if (OF_GUARD(rearm) && has_mark(impl) && use_memory(impl, false, launch) == OF_ACCESS_FAILED)
        throw std::runtime_error(of_error_message());
}

namespace {

// With gradient_as_bucket_view=True .grad is the very tensor through which
// DistributedDataParallel writes to that part of its bucket, in the next backward pass: so the
// mark on it is enough. Only DDP has it beside .grad; a flat buffer of the user's own has other
// tensors.
bool is_in_bucket(c10::TensorImpl *p, const at::Tensor &grad) {
    const c10::TensorImpl *g = grad.unsafeGetTensorImpl();
    if (c10::raw::intrusive_ptr::use_count(storage_of(g)) <= 2) // it, and an idle one
        return false;
    return grad.use_count() >= 2 + python_references(*g) && is_reduced_later(p);
}

bool is_shared_and_known(const Slot *slot, c10::TensorImpl *p, const at::Tensor &grad,
                         bool in_backward) {
    return slot->gradient_is_known || (in_backward ? slot->reduced : is_in_bucket(p, grad));
}

// For what reads the gradient here and now.
void await_now(const at::Tensor &grad) {
    if (!await_arrival(storage_of(grad.unsafeGetTensorImpl())))
        throw std::runtime_error(of_error_message());
}

// The gradient with the parameter's strides; a copy if it has others, or if updates of this step()
// that come behind it write there. is_like_it: it has these. The copy is made now, or when those
// have run that come before and write there.
const void *gradient_data(References *refs, of_inputs *in, c10::TensorImpl *p,
                          const at::Tensor &grad, bool is_like_it, const Overlap &written) {
    c10::TensorImpl *g = grad.unsafeGetTensorImpl();
    const Absent *absent = absent_of(storage_of(g));
    if (absent != nullptr && absent->update != nullptr && absent->update(storage_of(g), in)) {
        take_part(refs, in, g);
        return nullptr;
    }
    if (is_like_it && !written.behind) {
        if (in->in_backward)
            await_now(grad);
        else if (is_on_its_way(storage_of(g)))
            in->awaits = storage_of(g);
        if (is_shared_and_known(refs->slot, p, grad, in->in_backward)) {
            refs->make_special().shared_grad = grad;
        } else {
            in->grad_key = storage_of(g);
            take_part(refs, in, g);
        }
        return data_of(g);
    }
    await_now(grad);
    PlainMode plain;
    Special &special = refs->make_special();
    special.copy = at::empty_strided(p->sizes(), p->strides(), grad.options());
    if (written.is_before())
        special.stand_ins.push_back({grad, special.copy});
    else
        special.copy.copy_(grad);
    return data_of(special.copy.unsafeGetTensorImpl());
}

// Room for dense stand-ins of tensors with holes, overlaps or strides of their
// own; commit() fills it, when all updates before this one have run.
void *stand_in(References *refs, const at::Tensor &tensor) {
    PlainMode plain;
    const at::Tensor copy = at::empty(tensor.sizes(), tensor.options());
    refs->make_special().stand_ins.push_back({tensor, copy});
    return data_of(copy.unsafeGetTensorImpl());
}

// Fills in the state's addresses. *dense: whether everything but the gradient
// can be updated in place, element by element.
of_found look_up_state(Slot *slot, const c10::TensorImpl *p, unsigned used, of_inputs *in,
                       bool *dense) {
    *dense = p->is_non_overlapping_and_dense();
    for (size_t i = 0; i < slot->plan->rule->n_state; i++) {
        if ((used >> i & 1u) == 0)
            continue;
        if (check_state(slot, p, i, in) == OF_FOUND_ERROR)
            return OF_FOUND_ERROR;
        const c10::TensorImpl *s = slot->state[i].unsafeGetTensorImpl();
        launch_others(s);
        *dense = *dense && same_strides(p, s);
        in->state[i] = written_data_of(s);
    }
    if (step_is_on_gpu(slot))
        launch_others(slot->step.unsafeGetTensorImpl());
    for (size_t i = 0; counts_on_gpu(slot) && i < slot->plan->rule->n_counters; i++)
        launch_others(slot->counters[i].unsafeGetTensorImpl());
    return check_step(slot, p);
}

// Whether the gradient's memory is, or has a part that is, a state tensor's.
bool is_in_state(const Slot *slot, unsigned used, const c10::TensorImpl *g) {
    for (size_t i = 0; i < slot->plan->rule->n_state; i++)
        if ((used >> i & 1u) != 0 &&
            storage_of(slot->state[i].unsafeGetTensorImpl()) == storage_of(g))
            return true;
    return false;
}

// Whether the update applies the factors that clipping has left pending on its gradient.
// PyTorch's operators don't. Neither does a kernel that writes the gradient: divided, or as a
// program makes it.
bool applies_factor(const Slot *slot, const c10::TensorImpl *p, const c10::TensorImpl *g) {
    const Plan *plan = slot->plan;
    if (writes_gradient(slot) || is_by_host(slot))
        return false;
    if (!is_gpu(p->device()))
        return true;
    const of_stream ready = current_stream(p->device().index());
    return plan->mode == OF_FORWARD && !(plan->scalars->divide_gradients() && OF_GUARD(divided)) &&
           of_scaling_fits(storage_of(g), &ready);
}

// In 16 bits PyTorch's operators round once more where elements don't lie one after the other.
bool rounds_by_strides(const Slot *slot, const c10::TensorImpl *p, of_dtype dtype) {
    const of_rule *rule = slot->plan->rule;
    return rule->op_by_op && !rule->runs_programs && p->device().is_cpu() &&
           (dtype == OF_FLOAT16 || dtype == OF_BFLOAT16) && OF_GUARD(strides);
}

// Whether the update changes the gradient.
bool is_written_back(const Slot *slot) {
    return slot->plan->scalars->scale_gradients() || writes_gradient(slot);
}

void use_stand_ins(Slot *slot, const at::Tensor &grad, of_inputs *in, References *refs) {
    in->param = stand_in(refs, refs->param);
    for (size_t i = 0; i < slot->plan->rule->n_state; i++)
        if (in->state[i] != nullptr)
            in->state[i] = stand_in(refs, slot->state[i]);
    in->grad = stand_in(refs, grad);
    refs->special->n_written = refs->special->stand_ins.size() - (is_written_back(slot) ? 0 : 1);
}

// The writes of this step()'s other updates to the gradient's memory, which others know then.
Overlap written_to_gradient(const Slot *slot, c10::TensorImpl *p, const at::Tensor &grad,
                            bool in_backward) {
    if (in_backward || is_shared_and_known(slot, p, grad, in_backward))
        return {};
    return overlap_of_gradient(slot, grad.unsafeGetTensorImpl());
}

// Whether others may see what the update writes; refuses memory in which they would change it.
of_found look_who_shares(const Slot *slot, const c10::TensorImpl *p, const c10::TensorImpl *g,
                         unsigned used, bool dense, const Overlap &written, of_inputs *in) {
    const size_t known = 1 + slot->aliases.size(); // users of the memory, and ours
    const bool is_shared = OF_GUARD(privacy) && !is_private(storage_of(p), known);
    in->exclusive = !dense || is_shared || written.is_before();
    if ((!dense || written.is_before()) && written.state_behind)
        return refuse_between(slot);
    if (written.behind && is_written_back(slot))
        return refuse(slot, "the gradient of ",
                      "shares memory with a parameter behind it or its state, and the update writes "
                      "to the gradient",
                      ": put its clone() there");
    if (is_shared && !in->in_backward && is_in_other_state(slot, p))
        return refuse(slot, "", "shares memory with the optimizer state of another parameter",
                      ": put its clone() there");
    if (in->exclusive)
        compute_now(g);
    if (in->exclusive || is_in_state(slot, used, g) || states_share(slot, used))
        return check_apart(slot, p, g, used);
    return OF_FOUND_INPUTS;
}

void take_state(Slot *slot, of_inputs *in, References *refs) {
    for (size_t i = 0; i < slot->plan->rule->n_state; i++)
        if (in->state[i] != nullptr)
            take_part(refs, in, slot->state[i].unsafeGetTensorImpl());
    if (in->device != OF_CPU && step_is_on_gpu(slot)) {
        take_part(refs, in, slot->step.unsafeGetTensorImpl());
        in->step_at = static_cast<float *>(written_data_of(slot->step.unsafeGetTensorImpl()));
    }
    for (size_t i = 0; counts_on_gpu(slot) && i < slot->plan->rule->n_counters; i++) {
        c10::TensorImpl *counter = slot->counters[i].unsafeGetTensorImpl();
        take_part(refs, in, counter);
        in->numbers_at[i] = static_cast<float *>(written_data_of(counter));
    }
}

of_found fill_in(Slot *slot, c10::TensorImpl *p, const at::Tensor &grad, unsigned used,
                 of_inputs *in, References *refs) {
    bool dense = false;
    if (look_up_state(slot, p, used, in, &dense) == OF_FOUND_ERROR)
        return OF_FOUND_ERROR;
    refs->slot = slot;
    refs->consumes = in->in_backward;
    in->numel = p->numel();
    in->count = count_of(slot);
    refs->program = slot->program;
    in->program = slot->program ? &slot->program->core : nullptr;
    if (collect_gpu(slot, p, in, refs) == OF_FOUND_ERROR)
        return OF_FOUND_ERROR;
    // Values that the update writes back must arrive in the gradient.
    const c10::TensorImpl *g = grad.unsafeGetTensorImpl();
    const bool grad_is_like_it = same_strides(p, g) && !is_lazy(g);
    if (is_written_back(slot) || !grad_is_like_it)
        compute_now(g);
    if (rounds_by_strides(slot, p, in->dtype) && !(dense && grad_is_like_it) &&
        check_strides(slot, p, g, used) == OF_FOUND_ERROR)
        return OF_FOUND_ERROR;
    dense = dense && (!is_written_back(slot) || grad_is_like_it);
    if (!dense && slot->plan->rule->rounds && in->dtype != OF_FLOAT32)
        return refuse(slot, "", "or its state has holes or other strides",
                      ", and random integers belong to places in memory: make them contiguous, or "
                      "fuse the optimizer again");
    in->param = written_data_of(p);
    take_part(refs, in, p);
    const Overlap written = written_to_gradient(slot, p, grad, in->in_backward);
    if (check_on_gpu(slot, written) == OF_FOUND_ERROR ||
        look_who_shares(slot, p, g, used, dense, written, in) == OF_FOUND_ERROR)
        return OF_FOUND_ERROR;
    if (in->exclusive || refs->consumes)
        refs->param = reference_to(p);
    if (refs->consumes)
        refs->grad = grad.unsafeGetTensorImpl();
    if (dense)
        in->grad = gradient_data(refs, in, p, grad, grad_is_like_it, written);
    take_state(slot, in, refs);
    if (!dense) {
        await_now(grad);
        use_stand_ins(slot, grad, in, refs);
    }
    return OF_FOUND_INPUTS;
}

// Whether an update can take the parameter and its gradient. From here on no other update is
// pending on them.
of_found check_tensors(const Plan *plan, Slot *slot, c10::TensorImpl *p, c10::TensorImpl *g,
                       of_inputs *in) {
    if (check_param(slot, p, &in->dtype) == OF_FOUND_ERROR ||
        check_gradient(slot, p, g, is_written_back(slot)) == OF_FOUND_ERROR)
        return OF_FOUND_ERROR;
    launch_others(p);
    if (has_mark(g) && !is_absent(g))
        launch_others(g, applies_factor(slot, p, g) ? of_launch_at : of_access);
    if (slot->tried != ANYWHERE &&
        check_tried(slot, p, in->dtype) == OF_FOUND_ERROR)
        return OF_FOUND_ERROR;
    if (plan->rule->runs_programs && !slot->program)
        return refuse(slot, "", "has no program to update it", ": this is an error of optfuse");
    return OF_FOUND_INPUTS;
}

// The inputs, whose references live until release().
of_found fill_in_references(Slot *slot, const at::Tensor &grad, unsigned used, of_inputs *in) {
    References *refs = new (in->references) References;
    of_found found = OF_FOUND_ERROR;
    try {
        found = is_by_host(slot)
                    ? fill_in_by_host(slot, slot->param, grad, in, refs)
                    : fill_in(slot, slot->param, grad, used, in, refs);
    } catch (...) {
        refs->~References();
        throw;
    }
    if (found != OF_FOUND_INPUTS)
        refs->~References();
    return found;
}

void clear_inputs(of_inputs *in) {
    const of_inputs before = *in;
    *in = {};
    in->references = before.references;
    in->used = before.used;
    in->in_backward = before.in_backward;
}

} // namespace

of_found collect_special(Plan *plan, Slot *slot, const at::Tensor &grad, of_inputs *in) {
    c10::TensorImpl *p = slot->param, *g = grad.unsafeGetTensorImpl();
    clear_inputs(in);
    if (is_consumed(g))
        return OF_GUARD(consumed_twice)
                   ? refuse(slot, "the gradient of ", "has already been applied and freed",
                            " by backward fusion: call zero_grad() after each step(), and step() "
                            "once after each backward")
                   : OF_FOUND_NOTHING;
    if (runs_own_step(slot) && !in->in_backward) // step() itself has called the class's
        return OF_FOUND_NOTHING;
    if (check_tensors(plan, slot, p, g, in) == OF_FOUND_ERROR)
        return OF_FOUND_ERROR;
    const unsigned used = plan->rule->runs_programs ? slot->program->state() : in->used;
    if (state_is_missing(slot, used))
        return in->in_backward && plan->leaves_stateless ? OF_FOUND_NOTHING : OF_FOUND_NEEDS_STATE;
    in->mixed = is_mixed(slot, p, used);
    in->wide = is_wide(slot, p, used);
    if (is_gpu(p->device()) &&
        prepare_gpu(slot, p, in->dtype, in->mixed) == OF_FOUND_ERROR)
        return OF_FOUND_ERROR;
    return fill_in_references(slot, grad, used, in);
}

} // namespace optfuse
