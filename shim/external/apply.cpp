// SPDX-License-Identifier: BSD-3-Clause
// apply.cpp: updates of optimizers that have no kernels. Where there is a native
// update and nothing is unusual, that one runs; else Python runs the class's own
// step() on one parameter, by the callback of shim.h. Such an update can wait if
// all it changes is the parameter, its gradient and state tensors that are known;
// else it runs inside step(), as in stock.
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "compat.h"
#include "error.h"
#include "external/apply.h"
#include "gpu/device.h"
#include "gpu/place.h"
#include "guard.h"
#include "plan.h"
#include "python/callback.h"
#include "recorded/ahead.h"
#include "tensor/host.h"
#include "tensor/memory.h"
#include "tensor/overlap.h"
#include "tensor/references.h"
#include "tensor/refuse.h"
#include "tensor/threads.h"
#include "tensor/written.h"

namespace optfuse {
namespace {

using Functions = at::impl::PythonTorchFunctionTLS;
using Modes = c10::impl::TorchDispatchModeTLS;

// The state of a thread on which nobody has entered a mode.
c10::impl::LocalDispatchKeySet plain_keys() { return c10::impl::PODLocalDispatchKeySet{}; }

bool has_modes() {
    const auto now = c10::impl::tls_local_dispatch_key_set();
    const auto plain = plain_keys();
    return !(now.included_ == plain.included_) || !(now.excluded_ == plain.excluded_) ||
           at::impl::torch_function_mode_enabled() ||
           Functions::get_disabled_state() != at::impl::TorchFunctionDisabledState::ENABLED;
}

// An update that runs late does so under none of the modes that are entered there: they
// must neither see nor change it. Profilers go on recording.
class WithoutModes {
  public:
    explicit WithoutModes(bool grad_mode) {
        torch::jit::tracer::setTracingState(nullptr);
        c10::impl::_force_tls_local_dispatch_key_set(plain_keys());
        c10::AutogradState::set_tls_state(c10::AutogradState(grad_mode, false, true, true));
        Functions::set_state(Functions());
        Modes::set_state(Modes());
    }
    ~WithoutModes() {
        Modes::set_state(modes);
        Functions::set_state(functions);
        torch::jit::tracer::setTracingState(tracing);
        c10::AutogradState::set_tls_state(autograd);
    }
    WithoutModes(const WithoutModes &) = delete;
    WithoutModes &operator=(const WithoutModes &) = delete;

  private:
    const std::shared_ptr<torch::jit::tracer::TracingState> tracing =
        torch::jit::tracer::getTracingState();
    const c10::impl::ForceDispatchKeyGuard keys; // restored last: the others change it
    const c10::AutogradState autograd = c10::AutogradState::get_tls_state();
    const Functions functions = Functions::get_state();
    const Modes modes = Modes::get_state();
};

// Puts the update's gradient into .grad as long as it lives, if .grad is another one by now.
class GradientInPlace {
  public:
    GradientInPlace(const at::Tensor &param, const at::Tensor &gradient)
        : place(param.mutable_grad()), swapped(!place.is_same(gradient)) {
        if (swapped)
            before = std::exchange(place, gradient);
    }
    ~GradientInPlace() {
        if (swapped)
            place = std::move(before);
    }
    GradientInPlace(const GradientInPlace &) = delete;
    GradientInPlace &operator=(const GradientInPlace &) = delete;

  private:
    at::Tensor &place;
    const bool swapped;
    at::Tensor before;
};

// Autograd may have saved the parameter since step(), and must find the version that it saved.
class KeepVersion {
  public:
    explicit KeepVersion(const c10::TensorImpl *impl)
        : counter(impl->version_counter()),
          version(counter.enabled() ? counter.current_version() : 0) {}
    ~KeepVersion() {
        if (counter.enabled())
            counter.set_version(version);
    }
    KeepVersion(const KeepVersion &) = delete;
    KeepVersion &operator=(const KeepVersion &) = delete;

  private:
    c10::VariableVersion counter;
    const uint32_t version;
};

bool can_be_marked(const References *refs, const c10::TensorImpl *impl) {
    if (!impl->has_storage() || impl->key_set().has(c10::DispatchKey::Python))
        return false;
    if (!impl->is_non_overlapping_and_dense()) // perhaps expanded, which step() can't update
        return false;
    for (size_t i = 0; i < refs->n; i++)
        if (refs->storages[i].get() == storage_of(impl))
            return false;
    return true;
}

// Gradient and state become parts of the update; false: it can't be left pending.
bool take_all_parts(const Slot *slot, const at::Tensor &grad, of_inputs *in, References *refs) {
    if (!slot->can_wait || 2 + slot->own.size() > OF_MAX_KEYS)
        return false;
    std::vector<c10::TensorImpl *> parts{grad.unsafeGetTensorImpl()};
    for (const at::Tensor &state : slot->own)
        parts.push_back(state.unsafeGetTensorImpl());
    for (c10::TensorImpl *part : parts) {
        if (!can_be_marked(refs, part))
            return false;
        take_part(refs, in, part);
    }
    return true;
}

bool has_frozen_state(const Slot *slot) {
    return std::any_of(slot->own.begin(), slot->own.end(), [](const at::Tensor &state) {
        return is_frozen_inference(state.unsafeGetTensorImpl());
    });
}

void take_only_parameter(of_inputs *in, References *refs) {
    for (size_t i = 1; i < refs->n; i++)
        refs->storages[i].reset();
    in->n_keys = refs->n = 1;
}

bool run_python(Slot *slot) {
    if (ask_python(slot->plan, OF_SHIM_APPLY, slot->index) != 0)
        return true;
    const std::string reason = of_error_message();
    of_set_error("step() on %s failed: %s", slot->label.c_str(),
                 reason.empty() ? "it was interrupted" : reason.c_str());
    return false;
}

// Under modes the class's operators run Python, so the class runs too. So does it while a
// CUDA graph is captured: its errors say what a capture does not allow.
bool run_native(const of_inputs *in, const double *hyper, const References *refs) {
    const Slot *slot = refs->slot;
    if (slot->plan->native == nullptr || refs->special->as_is || !slot->can_wait ||
        in->stream.capture != 0)
        return false;
    if (!is_tried(slot, slot->param, in->dtype))
        return false;
    const c10::AutoGradMode no_grad(false);
    const c10::impl::ExcludeDispatchKeyGuard no_autograd(
        c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    return slot->plan->native({refs->param, refs->special->held_grad, slot->own, hyper});
}

bool update(const of_inputs *in, const double *hyper, References *refs) {
    const SteadyStreams not_here(false); // an optimizer's own step() may do anything
    Slot *slot = refs->slot;
    const at::Tensor &param = refs->param;
    std::optional<WithoutModes> plain;
    if (!refs->special || !refs->special->as_is)
        plain.emplace(!refs->special || refs->special->grad_mode);
    // Under the lock of the plan: no operator may come back to us.
    const c10::impl::ExcludeDispatchKeyGuard no_first_use(kPendingKey);
    c10::OptionalStreamGuard stream;
    if (in->device != OF_CPU)
        stream.reset_stream(c10::Stream(c10::Stream::UNSAFE, param.device(), in->stream.id));
    if (refs->program && refs->program->is_of_lines) {
        slot->plan->ahead->run(slot->index, refs->special->held_grad);
        return true;
    }
    if (run_native(in, hyper, refs))
        return true;
    const KeepVersion version(slot->param);
    const GradientInPlace gradient(param, refs->special->held_grad);
    return run_python(slot);
}

} // namespace

of_found fill_in_own(Slot *slot, c10::TensorImpl *p, const at::Tensor &grad, of_inputs *in,
                     References *refs) {
    for (const at::Tensor &state : slot->own)
        launch_others(state.unsafeGetTensorImpl());
    compute_now(grad.unsafeGetTensorImpl());
    // Other classes may put new tensors into the state: they run, or fail, inside step().
    const bool frozen = has_frozen_state(slot);
    if (frozen && slot->plan->native != nullptr)
        return refuse_frozen(slot, "the optimizer state of ");
    refs->slot = slot;
    refs->program = slot->program;
    in->program = slot->program ? &slot->program->core : nullptr;
    refs->consumes = in->in_backward;
    // In backward the modes are those of backward(), not of step().
    Special &special = refs->make_special();
    special.as_is = !refs->consumes && has_modes();
    special.grad_mode = refs->consumes || c10::GradMode::is_enabled();
    in->numel = p->numel();
    in->count.step = 1;
    if (place(slot, p, in, refs) == OF_FOUND_ERROR)
        return OF_FOUND_ERROR;
    take_part(refs, in, p);
    in->param = written_data_of(p);
    in->grad = data_of(grad.unsafeGetTensorImpl());
    const Overlap written =
        in->in_backward ? Overlap() : overlap_of_gradient(slot, grad.unsafeGetTensorImpl());
    if (check_on_gpu(slot, written) == OF_FOUND_ERROR)
        return OF_FOUND_ERROR;
    in->exclusive = special.as_is || frozen || written.before ||
                    (OF_GUARD(privacy) && !is_private(storage_of(p), 1)) ||
                    !take_all_parts(slot, grad, in, refs);
    if (in->exclusive && written.state_behind)
        return refuse_between(slot);
    if (in->exclusive)
        take_only_parameter(in, refs);
    // Kept alive: step() needs the tensor itself, and a plan whose optimizer dies
    // while an update runs is freed after that.
    refs->param = reference_to(p);
    if (refs->consumes)
        refs->grad = grad.unsafeGetTensorImpl();
    special.held_grad = grad;
    return OF_FOUND_INPUTS;
}

namespace {

// Stock's operators run on the thread of step().
bool steps_elsewhere(const Plan *plan) {
    return pthread_equal(plan->stepping.load(std::memory_order_relaxed), pthread_self()) == 0;
}

bool apply(void *, of_inputs *in, const double *hyper) {
    References *refs = static_cast<References *>(in->references);
    std::optional<KeepThreads> as_before;
    if (steps_elsewhere(refs->slot->plan))
        as_before.emplace();
    for (size_t i = 0; i < refs->n; i++)
        unseal(refs->storages[i].get());
    return attempt("the update of ", refs->slot->label, false,
                   [&] { return update(in, hyper, refs); });
}

} // namespace

const of_external_host external_host = {sizeof(of_external_host), apply};

} // namespace optfuse
