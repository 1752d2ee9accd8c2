// SPDX-License-Identifier: BSD-3-Clause
// refuse.cpp: what can't be updated, and what to do then.
#include <ATen/MemoryOverlap.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/InferenceMode.h>

#include "base/compat.h"
#include "base/device.h"
#include "guard.h"
#include "memory/memory.h"
#include "plan/plan.h"
#include "plan/refuse.h"

namespace optfuse {

namespace {

// Several elements share one number, as after expand().
bool is_expanded(const c10::TensorImpl *impl) {
    return !impl->is_non_overlapping_and_dense() &&
           at::has_internal_overlap(const_cast<c10::TensorImpl *>(impl)) == at::MemOverlap::Yes;
}

bool has_memory(const c10::TensorImpl *impl) {
    return impl->layout() == c10::kStrided && impl->has_storage();
}

} // namespace

bool is_lazy(const c10::TensorImpl *impl) {
    constexpr c10::DispatchKeySet flags({c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
    return OF_GUARD(lazy) && impl->key_set().has_any(flags);
}

of_found refuse(const Slot *slot, const char *which, const char *what, const std::string &detail) {
    of_set_error("%s%s %s%s; nothing was updated", which, slot->label.c_str(), what,
                 detail.c_str());
    return OF_FOUND_ERROR;
}

bool is_frozen_inference(const c10::TensorImpl *impl) {
    return const_cast<c10::TensorImpl *>(impl)->is_inference() && !c10::InferenceMode::is_enabled();
}

of_found refuse_frozen(const Slot *slot, const char *which) {
    return refuse(slot, which, "was made under torch.inference_mode()",
                  " and can't be updated outside of it: put its clone() there");
}

of_found check_param(const Slot *slot, const c10::TensorImpl *p, of_dtype *dtype) {
    if (!has_memory(p) || (!p->device().is_cpu() && !is_gpu(p->device())))
        return refuse(slot, "", "has moved to ",
                      p->device().str() + ", where it has no fused update: move the model back, "
                                          "or unfuse the optimizer");
    if (!dtype_of(p, dtype))
        return refuse(slot, "",
                      "has a dtype without a fused update: ", std::string(p->dtype().name()));
    if (is_lazy(p))
        return refuse(slot, "", "is a lazily negated view",
                      ": assign param.data.resolve_neg() to it");
    if (is_expanded(p))
        return refuse(
            slot, "", "is expanded",
            ", so that several elements share one number: assign param.data.clone() to it");
    if (is_frozen_inference(p))
        return refuse(slot, "", "was made under torch.inference_mode()",
                      " and can't be updated outside of it: clone it");
    return OF_FOUND_INPUTS;
}

constexpr int64_t DEVICES = 256; // of a dtype: the CPU, and GPUs from 1 on

int64_t place_of(const c10::TensorImpl *p, of_dtype dtype) {
    return int64_t{dtype} * DEVICES + (is_gpu(p->device()) ? p->device().index() + 1 : 0);
}

bool is_tried(const Slot *slot, const c10::TensorImpl *p, of_dtype dtype) {
    const bool was_on_gpu = slot->tried >= 0 && slot->tried % DEVICES != 0;
    return slot->tried == ANYWHERE || slot->tried == place_of(p, dtype) ||
           (!was_on_gpu && !is_gpu(p->device()) && !(slot->plan->tried_on_cpu >> dtype & 1));
}

of_found check_tried(const Slot *slot, const c10::TensorImpl *p, of_dtype dtype) {
    if (is_tried(slot, p, dtype))
        return OF_FOUND_INPUTS;
    std::string before = "not among its parameters";
    if (slot->tried >= 0) {
        const auto index = static_cast<c10::DeviceIndex>(slot->tried % DEVICES - 1);
        before = of_dtype_name(static_cast<of_dtype>(slot->tried / DEVICES));
        before += " on " + (index < 0 ? "cpu" : c10::Device(gpu_type(), index).str());
    }
    return refuse(slot, "", "is ",
                  std::string(of_dtype_name(dtype)) + " on " + p->device().str() + ", but was " +
                      before +
                      " when the optimizer was fused, and the kernels have been tried for that "
                      "only: call optfuse.unfuse() and fuse() again");
}

of_found check_gradient(const Slot *slot, const c10::TensorImpl *p, const c10::TensorImpl *g,
                        bool is_written) {
    const char *which = "the gradient of ";
    if (g->layout() != c10::kStrided)
        return refuse(slot, which, "is sparse",
                      ", which has no fused update: use a dense gradient (sparse=False) or leave "
                      "this parameter to an optimizer of its own");
    if (g->key_set().has(c10::DispatchKey::Python) || !g->has_storage())
        return refuse(slot, which, "is a tensor subclass", ", which optfuse does not support");
    if (g->device() != p->device())
        return refuse(slot, which, "is on another device: ", g->device().str());
    if (g->dtype() != p->dtype())
        return refuse(slot, which, "has another dtype: ", std::string(g->dtype().name()));
    if (!equal(g->sizes(), p->sizes()))
        return refuse(slot, which, "has another shape", "");
    if (is_written && is_expanded(g))
        return refuse(slot, which, "is expanded",
                      ", so that several elements share one number, and the update writes to it: "
                      "put its clone() there");
    return OF_FOUND_INPUTS;
}

namespace {

// One past the last byte that a tensor of positive strides uses.
const char *end_of(const c10::TensorImpl *impl) {
    int64_t last = 0;
    for (int64_t d = 0; d < impl->dim(); d++)
        last += (impl->sizes()[d] - 1) * impl->strides()[d];
    return static_cast<const char *>(data_of(impl)) +
           static_cast<size_t>(last + 1) * impl->dtype().itemsize();
}

// Strides of dimensions of one element mean nothing.
bool lies_like(const c10::TensorImpl *a, const c10::TensorImpl *b) {
    for (int64_t d = 0; d < b->dim(); d++)
        if (b->sizes()[d] != 1 && a->strides()[d] != b->strides()[d])
            return false;
    return true;
}

} // namespace

bool meet(const c10::TensorImpl *a, const c10::TensorImpl *b) {
    return storage_of(a) == storage_of(b) && a->numel() != 0 && b->numel() != 0 &&
           data_of(a) < end_of(b) && data_of(b) < end_of(a);
}

namespace {

bool has_form(const c10::TensorImpl *s, const c10::TensorImpl *p, const of_inputs *in) {
    const at::ScalarType own = p->dtype().toScalarType();
    const at::ScalarType dtype = in->mixed ? at::kBFloat16 : in->wide ? at::kFloat : own;
    return s->dtype().toScalarType() == dtype && equal(s->sizes(), p->sizes());
}

// A bfloat16 state tensor of a float32 parameter, of a rule that has kernels for such.
bool may_be_mixed(const Slot *slot, const c10::TensorImpl *p, const c10::TensorImpl *s) {
    return of_rule_mixed(slot->plan->rule) != nullptr &&
           p->dtype().toScalarType() == at::kFloat && s->dtype().toScalarType() == at::kBFloat16;
}

} // namespace

bool is_mixed(const Slot *slot, const c10::TensorImpl *p, unsigned used) {
    bool all = slot->plan->takes_mixed && is_gpu(p->device()) && used != 0;
    for (size_t i = 0; all && i < slot->plan->rule->n_state; i++)
        if ((used >> i & 1u) != 0)
            all = may_be_mixed(slot, p, slot->state[i].unsafeGetTensorImpl());
    return all;
}

bool is_wide(const Slot *slot, const c10::TensorImpl *p, unsigned used) {
    bool all = slot->plan->rule->rounds && p->dtype().itemsize() == 2;
    for (size_t i = 0; all && i < slot->plan->rule->n_state; i++)
        if ((used >> i & 1u) != 0)
            all = slot->state[i].scalar_type() == at::kFloat;
    return all;
}

of_found check_state(const Slot *slot, const c10::TensorImpl *p, size_t i, const of_inputs *in) {
    const char *which = "the optimizer state of ";
    const c10::TensorImpl *s = slot->state[i].unsafeGetTensorImpl();
    if (!in->mixed && may_be_mixed(slot, p, s))
        return refuse(slot, which, "is bfloat16",
                      ", which PyTorch takes for float32 parameters on a GPU only, from release "
                      "2.12 on, and of all averages of a parameter or of none: load or create it "
                      "in float32");
    if (!has_memory(s) || s->device() != p->device() || !has_form(s, p, in))
        return refuse(slot, which, "has another dtype, device, layout or shape than the parameter",
                      ": load or create it to match");
    if (is_lazy(s) || is_expanded(s))
        return refuse(slot, which, "is a lazily negated or an expanded view",
                      ": put its resolve_neg().clone() there");
    if (is_frozen_inference(s))
        return refuse_frozen(slot, which);
    return OF_FOUND_INPUTS;
}

namespace {

// ASGD's. (It asks for the step, too, which elsewhere may be on either.)
of_found check_counters_on_gpu(const Slot *slot, const c10::TensorImpl *p) {
    const of_rule *rule = slot->plan->rule;
    const auto made = c10::get_default_dtype_as_scalartype(); // torch.optim's mu, on its way
    if (made != at::kFloat && made != at::kDouble)
        return refuse(slot, "the update of ", "would round its numbers to the default dtype, ",
                      std::string(c10::toString(made)) +
                          ": unfuse the optimizer, or call torch.set_default_dtype(torch.float32) "
                          "before step()");
    for (size_t i = 0; i <= rule->n_counters; i++) {
        const at::Tensor &counter = i < rule->n_counters ? slot->counters[i] : slot->step;
        const char *name = i < rule->n_counters ? rule->counters[i] : "step";
        if (counter.device() != p->device() || counter.dim() != 0 || counter.is_inference() ||
            counter.scalar_type() != at::kFloat || is_lazy(counter.unsafeGetTensorImpl()))
            return refuse(slot, ("state['" + std::string(name) + "'] of ").c_str(),
                          "is not a 0-dim float32 tensor on its parameter's GPU",
                          ", as torch.optim makes it; unfuse the optimizer and fuse it again, so "
                          "that the class's own step() takes it as it is");
    }
    return OF_FOUND_INPUTS;
}

of_found check_counters(const Slot *slot, const c10::TensorImpl *p) {
    if (counts_on_gpu(slot))
        return check_counters_on_gpu(slot, p);
    for (size_t i = 0; i < slot->plan->rule->n_counters; i++) {
        const std::string which = std::string("state['") + slot->plan->rule->counters[i] + "'] of ";
        const at::Tensor &counter = slot->counters[i];
        const at::ScalarType type = counter.scalar_type();
        const bool is_usual = type == at::kFloat || type == at::kDouble;
        if (!counter.is_cpu() || counter.numel() != 1 || !is_usual ||
            type != slot->counters[0].scalar_type())
            return refuse(slot, which.c_str(), "is not a 0-dim float tensor on the CPU",
                          ", as torch.optim makes it without capturable=True");
        if (is_frozen_inference(counter.unsafeGetTensorImpl()))
            return refuse_frozen(slot, which.c_str());
    }
    return OF_FOUND_INPUTS;
}

} // namespace

bool states_share(const Slot *slot, unsigned used) {
    if (slot->plan->rule->runs_programs)
        return false;
    for (size_t i = 1; i < slot->plan->rule->n_state; i++)
        for (size_t j = 0; j < i; j++)
            if ((used >> i & used >> j & 1u) != 0 &&
                storage_of(slot->state[i].unsafeGetTensorImpl()) ==
                    storage_of(slot->state[j].unsafeGetTensorImpl()))
                return true;
    return false;
}

of_found check_apart(const Slot *slot, const c10::TensorImpl *p, const c10::TensorImpl *g,
                     unsigned used) {
    const char *remedy = ", so that the update would write one while it reads the other: put its "
                         "clone() there";
    if (!OF_GUARD(apart))
        return OF_FOUND_INPUTS;
    if (meet(p, g))
        return refuse(slot, "the gradient of ", "shares memory with the parameter", remedy);
    for (size_t i = 0; i < slot->plan->rule->n_state; i++) {
        if ((used >> i & 1u) == 0)
            continue;
        const c10::TensorImpl *s = slot->state[i].unsafeGetTensorImpl();
        if (meet(s, p) || meet(s, g))
            return refuse(slot, "the optimizer state of ",
                          "shares memory with the parameter or its gradient", remedy);
        for (size_t j = 0; j < i && !slot->plan->rule->runs_programs; j++)
            if ((used >> j & 1u) != 0 && meet(s, slot->state[j].unsafeGetTensorImpl()))
                return refuse(slot, "two tensors of the optimizer state of ",
                              "share memory with each other", remedy);
    }
    return OF_FOUND_INPUTS;
}

of_found check_strides(const Slot *slot, const c10::TensorImpl *p, const c10::TensorImpl *g,
                       unsigned used) {
    bool alike = p->is_non_overlapping_and_dense() && lies_like(g, p);
    for (size_t i = 0; i < slot->plan->rule->n_state; i++)
        if ((used >> i & 1u) != 0)
            alike = alike && lies_like(slot->state[i].unsafeGetTensorImpl(), p);
    if (alike)
        return OF_FOUND_INPUTS;
    return refuse(slot, "", "or its gradient or state has holes or other strides",
                  ", where PyTorch's operators round 16 bits once more: make them contiguous, or "
                  "fuse the optimizer again");
}

bool step_is_on_gpu(const Slot *slot) {
    return slot->step.defined() && is_gpu(slot->step.unsafeGetTensorImpl()->device());
}

bool counts_on_gpu(const Slot *slot) {
    return slot->plan->rule->counts_on_gpu && is_gpu(slot->param->device());
}

of_found check_step(const Slot *slot, const c10::TensorImpl *p) {
    const char *which = "the step counter of ";
    if (check_counters(slot, p) == OF_FOUND_ERROR)
        return OF_FOUND_ERROR;
    if (slot->step.defined() && !slot->step.device().is_cpu() &&
        (slot->step.device() != p->device() || slot->step.scalar_type() != at::kFloat))
        return refuse(slot, which, "is on another device or is not float32",
                      ": state['step'] must be a float32 tensor on the CPU or with its parameter");
    if (slot->step.defined() && is_frozen_inference(slot->step.unsafeGetTensorImpl()))
        return refuse_frozen(slot, which);
    return OF_FOUND_INPUTS;
}

} // namespace optfuse
