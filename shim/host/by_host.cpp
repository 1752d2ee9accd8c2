// SPDX-License-Identifier: BSD-3-Clause
// by_host.cpp: updates that are no programs of the core's. They run when a gradient of backward mode is
// complete: the lines of a step() that has run ahead (ahead.h), a native update (native/native.h), or
// the class's own step() on one parameter, by the callback of shim.h.
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <memory>
#include <optional>

#include "base/compat.h"
#include "base/device.h"
#include "base/error.h"
#include "base/threads.h"
#include "gpu/collect.h"
#include "guard.h"
#include "host/host.h"
#include "memory/memory.h"
#include "memory/written.h"
#include "native/native.h"
#include "plan/overlap.h"
#include "plan/plan.h"
#include "plan/references.h"
#include "plan/refuse.h"
#include "plan/slots.h"
#include "python/callback.h"

namespace optfuse {
namespace {

using Functions = at::impl::PythonTorchFunctionTLS;
using Modes = c10::impl::TorchDispatchModeTLS;

// The state of a thread on which nobody has entered a mode.
c10::impl::LocalDispatchKeySet plain_keys() { return c10::impl::PODLocalDispatchKeySet{}; }

// An update that runs elsewhere than in step() does so under none of the modes that are entered there:
// they must neither see nor change it. Profilers go on recording.
class WithoutModes : Pinned {
  public:
    WithoutModes() {
        torch::jit::tracer::setTracingState(nullptr);
        c10::impl::_force_tls_local_dispatch_key_set(plain_keys());
        c10::AutogradState::set_tls_state(c10::AutogradState(true, false, true, true));
        Functions::set_state(Functions());
        Modes::set_state(Modes());
    }
    ~WithoutModes() {
        Modes::set_state(modes);
        Functions::set_state(functions);
        torch::jit::tracer::setTracingState(tracing);
        c10::AutogradState::set_tls_state(autograd);
    }

  private:
    const std::shared_ptr<torch::jit::tracer::TracingState> tracing =
        torch::jit::tracer::getTracingState();
    const c10::impl::ForceDispatchKeyGuard keys; // restored last: the others change it
    const c10::AutogradState autograd = c10::AutogradState::get_tls_state();
    const Functions functions = Functions::get_state();
    const Modes modes = Modes::get_state();
};

// Autograd may have saved the parameter since step(), and must find the version that it saved.
class KeepVersion : Pinned {
  public:
    explicit KeepVersion(const c10::TensorImpl *impl)
        : counter(impl->version_counter()),
          version(counter.enabled() ? counter.current_version() : 0) {}
    ~KeepVersion() {
        if (counter.enabled())
            counter.set_version(version);
    }

  private:
    c10::VariableVersion counter;
    const uint32_t version;
};

bool run_python(Slot *slot) {
    if (slot->plan->owner->update(slot->plan, slot->index))
        return true;
    const std::string reason = of_error_message();
    of_set_error("step() on %s failed: %s", slot->label.c_str(),
                 reason.empty() ? "it was interrupted" : reason.c_str());
    return false;
}

bool run_native(const References *refs) {
    const Slot *slot = refs->slot;
    const Plan *plan = slot->plan;
    if (plan->native == nullptr || slot->group >= plan->numbers.size())
        return false;
    const c10::AutoGradMode no_grad(false);
    const c10::impl::ExcludeDispatchKeyGuard no_autograd(
        c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    return plan->native({refs->param, refs->special->held_grad, slot->own,
                         plan->numbers[slot->group].data()});
}

bool update(const of_inputs *in, References *refs) {
    const SteadyStreams not_here(false); // an optimizer's own step() may do anything
    Slot *slot = refs->slot;
    const WithoutModes plain;
    // Under the lock of the plan: no operator may come back to us.
    const c10::impl::ExcludeDispatchKeyGuard no_first_use(kPendingKey);
    c10::OptionalStreamGuard stream;
    if (in->device != OF_CPU)
        stream.reset_stream(
            c10::Stream(c10::Stream::UNSAFE, slot->param->device(), in->stream.id));
    if (!refs->program->is_own) {
        slot->plan->ahead->run(slot->index, refs->special->held_grad);
        return true;
    }
    if (run_native(refs))
        return true;
    const KeepVersion version(slot->param);
    return run_python(slot);
}

} // namespace

of_found fill_in_by_host(Slot *slot, c10::TensorImpl *p, const at::Tensor &grad, of_inputs *in,
                         References *refs) {
    for (const at::Tensor &state : slot->own)
        launch_others(state.unsafeGetTensorImpl());
    compute_now(grad.unsafeGetTensorImpl());
    if (runs_own_step(slot) && OF_GUARD(alone) &&
        (slot->version != param_version(*slot) || slot->state_version != state_version(*slot)))
        return refuse(slot, "", "or its state was written since this backward pass began",
                      ", by step() of another parameter or by a hook; a class whose step() does so "
                      "must not be registered: leave optfuse.register() out");
    refs->slot = slot;
    refs->program = slot->program;
    in->program = &slot->program->core;
    refs->consumes = in->in_backward;
    in->numel = p->numel();
    in->count.step = 1;
    if (collect_gpu(slot, p, in, refs) == OF_FOUND_ERROR ||
        check_on_gpu(slot, Overlap()) == OF_FOUND_ERROR)
        return OF_FOUND_ERROR;
    take_part(refs, in, p);
    in->param = written_data_of(p);
    in->grad = data_of(grad.unsafeGetTensorImpl());
    in->exclusive = true;
    // Kept alive: step() needs the tensor itself, and a plan whose optimizer dies
    // while an update runs is freed after that.
    refs->param = reference_to(p);
    if (refs->consumes)
        refs->grad = grad.unsafeGetTensorImpl();
    refs->make_special().held_grad = grad;
    return OF_FOUND_INPUTS;
}

namespace {

// Stock's operators run on the thread of step().
bool steps_elsewhere(const Plan *plan) {
    return pthread_equal(plan->stepping.load(std::memory_order_relaxed), pthread_self()) == 0;
}

bool apply(void *, of_inputs *in) {
    References *refs = static_cast<References *>(in->references);
    std::optional<KeepThreads> as_before;
    if (steps_elsewhere(refs->slot->plan))
        as_before.emplace();
    for (size_t i = 0; i < refs->n; i++)
        unseal(refs->storages[i].get());
    return attempt("the update of ", refs->slot->label, false, [&] { return update(in, refs); });
}

} // namespace

const of_external_host external_host = {sizeof(of_external_host), apply};

} // namespace optfuse
