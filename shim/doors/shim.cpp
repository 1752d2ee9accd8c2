// SPDX-License-Identifier: BSD-3-Clause
// shim.cpp: the C ABI of shim.h.
#include <ATen/record_function.h>
#include <pthread.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absent/awaited.h"
#include "absent/consumed.h"
#include "autograd/backward.h"
#include "base/compat.h"
#include "base/device.h"
#include "base/error.h"
#include "base/threads.h"
#include "clipping/pending.h"
#include "doors/start.h"
#include "guard.h"
#include "host/first_use.h"
#include "host/host.h"
#include "memory/gradient.h"
#include "memory/heap.h"
#include "memory/memory.h"
#include "native/native.h"
#include "plan/plan.h"
#include "plan/slots.h"
#include "promises/layer.h"
#include "promises/promise.h"
#include "python/callback.h"
#include "python/gil.h"
#include "python/interpreter.h"
#include "python/log.h"

using optfuse::plan_of;

namespace {

int failed(const std::exception &e) {
    of_set_error("%s", e.what());
    return OF_REFUSED;
}

// The mark may stand for the update of another plan. After a flush there mostly is none.
bool clean(c10::TensorImpl *impl) {
    if (!optfuse::has_mark(impl) || optfuse::is_absent(impl))
        return true;
    const bool is_certain = !of_any_pending() && !optfuse::is_any_on_its_way();
    if (!is_certain && optfuse::use_memory(impl, false) >= OF_IN_FLIGHT)
        return false;
    if (!optfuse::are_marks_wanted())
        optfuse::unmark(impl);
    return true;
}

// Whether none of the plan's tensors has the mark afterwards; gradients lose theirs at their first
// use: another thread may change .grad, which no program expects to be read here. With Plan::alone
// and telling.
bool clean_all(const optfuse::Plan &plan) {
    bool all = true;
    for (const optfuse::Slot *slot : plan.slots) {
        all &= clean(slot->param);
        for (c10::TensorImpl *wrapper : slot->wrappers)
            all &= clean(wrapper);
        for (const at::Tensor &alias : slot->aliases)
            all &= clean(alias.unsafeGetTensorImpl());
        optfuse::each_state(
            *slot, [&](const at::Tensor &state) { all &= clean(state.unsafeGetTensorImpl()); });
        if (const auto average = slot->marked_average.lock(); average.defined())
            all &= clean(average.get());
    }
    return all;
}

// A handler of a signal may call in the middle of an update, whose lock this thread has.
bool refuses(of_shim_plan *handle) {
    const bool updating = optfuse::is_updating_here(plan_of(handle));
    if (updating)
        of_set_error("the optimizer is called in the middle of one of its updates, by a signal "
                     "handler for example; let the handler set a flag, and call the optimizer "
                     "after step()");
    return updating;
}

int choose_isa(const char *name, of_isa *out) {
    const of_isa best = of_isa_detect();
    *out = best;
    if (*name == '\0')
        return OF_OK;
    if (!of_isa_parse(name, out)) {
        of_set_error("OPTFUSE_ISA=%s is not one of c, baseline, avx2, avx512, sve", name);
        return OF_INVALID;
    }
    if (!of_isa_runs(*out)) {
        of_set_error("OPTFUSE_ISA=%s: the best that this processor runs is %s", name, of_isa_name(best));
        return OF_INVALID;
    }
    return OF_OK;
}

} // namespace

extern "C" {

int of_shim_init(void *error_type) {
    try {
        if (!of_python_find())
            return OF_REFUSED;
        const int status = optfuse::start();
        if (status != OF_OK)
            return status;
        optfuse::PythonError::type = static_cast<_object *>(error_type);
        return OF_OK;
    } catch (const std::exception &e) {
        return failed(e);
    }
}

void of_shim_log_to(void *receive) { of_log_to(static_cast<of_object *>(receive)); }

const char *of_shim_rules(void) { return of_rules_text; }

int of_shim_plan_new(const char *rule, int mode, const char *isa, size_t bucket_bytes,
                     size_t passes, of_shim_plan **out) {
    try {
        of_plan_options options = {};
        options.struct_size = sizeof options;
        options.mode = static_cast<of_mode>(mode);
        options.bucket_bytes[OF_CPU] = options.bucket_bytes[OF_CUDA] = bucket_bytes;
        options.passes = passes;
        optfuse::fill_reference(&options);
        const int bad_isa = choose_isa(isa, &options.isa);
        if (bad_isa != OF_OK)
            return bad_isa;
        auto plan = std::make_shared<optfuse::Plan>();
        of_host host = optfuse::make_host(plan.get());
        host.scaling = &optfuse::scaling_host;
        host.await = &optfuse::await_host;
        host.product = &optfuse::product_host;
        if (options.mode == OF_BACKWARD)
            optfuse::update_in_backward(&host);
        if (options.mode == OF_FINAL)
            optfuse::update_in_hooks(&host);
        const of_status status = of_plan_create(&host, rule, &options, &plan->core);
        if (status != OF_OK)
            return status;
        plan->mode = options.mode;
        plan->rule = of_plan_rule(plan->core);
        plan->self = plan;
        *out = optfuse::handle_of(plan.get());
        return OF_OK;
    } catch (const std::exception &e) {
        return failed(e);
    }
}

void of_shim_plan_free(of_shim_plan *handle) {
    optfuse::Plan *plan = plan_of(handle);
    plan->closed.store(true, std::memory_order_release);
    plan->steps->fetch_add(1, std::memory_order_release);
    of_plan_clear(plan->core);
    plan->slots.clear();
    if (plan->owner != nullptr)
        plan->owner->close();
    const std::shared_ptr<optfuse::Plan> last = std::move(plan->self);
}

int of_shim_clear(of_shim_plan *handle) {
    if (refuses(handle))
        return OF_REFUSED;
    optfuse::Plan *plan = plan_of(handle);
    plan->slots.clear();
    of_plan_clear(plan->core);
    return OF_OK;
}

int of_shim_group(of_shim_plan *handle, size_t group, const double *hyper, size_t n_hyper) {
    if (refuses(handle))
        return OF_REFUSED;
    return of_plan_set_group(plan_of(handle)->core, group, hyper, n_hyper);
}

namespace {

bool is_kept(const optfuse::Slot *slot) {
    const at::Tensor &grad = optfuse::gradient_of(slot->param);
    return grad.defined() && optfuse::is_of_use(grad.unsafeGetTensorImpl(), slot->used);
}

// Backward mode: stock would not apply a gradient that has been dropped since
// backward, and would apply one that has taken its place.
bool gradients_are_kept(optfuse::Plan *plan) {
    if (!OF_GUARD(discarded) || of_plan_unconfirmed(plan->core) == 0)
        return true;
    of_plan_close(plan->core);
    // As backward usually leaves it: then no lock has to be taken for each slot.
    const bool all = of_plan_unconfirmed(plan->core) == plan->slots.size();
    for (const optfuse::Slot *slot : plan->slots)
        if ((all || of_plan_is_updated(plan->core, slot->index)) && !is_kept(slot)) {
            of_set_error("%sthe gradient of %s was discarded, zeroed or replaced between "
                         "backward() and step(), but backward fusion has already applied it.\n"
                         "Run backward passes whose gradients are thrown away inside `with "
                         "optfuse.accumulate(optimizer):`.\nWhere gradients are changed, use "
                         "optfuse.fuse(optimizer, mode=\"forward\")",
                         optfuse::find_caller().place.c_str(), slot->label.c_str());
            return false;
        }
    return true;
}

// Parameters may be marked because backward left their gradients in buckets on a GPU, and each use
// of a marked one costs a look-up. The marks stand for nothing if nothing in the process is pending
// or in flight, and after backward nothing of this plan is.
void take_marks_off(const optfuse::Plan *plan) {
    if (plan->mode != OF_BACKWARD || of_any_pending() || optfuse::marks_stay())
        return;
    for (const optfuse::Slot *slot : plan->slots)
        if (optfuse::has_mark(slot->param))
            optfuse::unmark(slot->param);
}

bool takes_roots(const optfuse::Slot *slot) {
    const auto is_root = [](const of_instruction &by) { return by.operation == OF_OPERATOR_sqrt; };
    const optfuse::Program *program = slot->program.get();
    if (program != nullptr)
        return std::any_of(program->code.begin(), program->code.end(), is_root);
    const of_rule *rule = slot->plan->rule;
    if (rule->n_roots == 0)
        return false;
    double hyper[OF_MAX_HYPER];
    of_plan_get_group(slot->plan->core, slot->group, hyper);
    const bool counts = slot->step.defined() && slot->step.is_cpu(); // this step, too
    const c10::TensorImpl *counter = slot->step.unsafeGetTensorImpl();
    return of_rule_takes_roots(rule, hyper, counts ? optfuse::number_after(counter) - 1 : 1);
}

// Between float32 and bfloat16, which PyTorch shares out whatever the size: Muon to bfloat16, and
// Adafactor from it.
bool casts(const optfuse::Slot *slot) {
    const bool is_muon = slot->plan->native == optfuse::muon;
    return slot->param->dtype() == (is_muon ? at::kFloat : at::kBFloat16);
}

// Stock's step() sets this thread's number of threads, by which the products of matrices that come
// later round (base/threads.h): PyTorch shares out what its fused kernels do, whatever its size,
// and square roots earlier than its other operators.
bool sets_threads(const optfuse::Slot *slot) {
    constexpr int64_t kRootsSharedOut = 2048;
    if (!slot->param->device().is_cpu() || !optfuse::gradient_of(slot->param).defined())
        return false;
    const of_rule *rule = slot->plan->rule;
    const int64_t n = slot->param->numel();
    if (!rule->op_by_op)
        return n > 0;
    if (slot->plan->native != nullptr)
        return n >= (casts(slot) ? 1 : optfuse::kSquaresSharedOut); // norms
    return n >= optfuse::kSharedOut || (n >= kRootsSharedOut && takes_roots(slot));
}

void set_threads_as_stock(const optfuse::Plan *plan) {
    thread_local bool is_set = false;
    optfuse::set_owed_threads();
    if (is_set || std::none_of(plan->slots.begin(), plan->slots.end(), sets_threads))
        return;
    is_set = true;
    optfuse::set_threads_as_operators(optfuse::kSharedOut);
}

} // namespace

int of_shim_step(of_shim_plan *handle, size_t *needs, size_t capacity, size_t *n_needs) {
    optfuse::Plan *plan = plan_of(handle);
    if (refuses(handle))
        return OF_REFUSED;
    optfuse::note_stepping_thread();
    plan->stepping.store(pthread_self(), std::memory_order_relaxed);
    if (!gradients_are_kept(plan))
        return OF_INVALID;
    plan->written.clear();
    const optfuse::SteadyStreams inside_step;
    const int status = of_plan_step(plan->core, needs, capacity, n_needs);
    if (status != OF_OK)
        return status;
    set_threads_as_stock(plan);
    plan->steps->fetch_add(1, std::memory_order_release);
    take_marks_off(plan);
    return status;
}

int of_shim_step_slot(of_shim_plan *handle, size_t slot, bool at_once) {
    optfuse::Plan *plan = plan_of(handle);
    if (refuses(handle))
        return OF_REFUSED;
    plan->written.clear();
    const optfuse::SteadyStreams inside_step;
    return of_plan_step_slot(plan->core, slot, at_once);
}

int of_shim_flush(of_shim_plan *handle, bool drain, bool *cleaned) {
    optfuse::Plan *plan = plan_of(handle);
    *cleaned = false;
    if (refuses(handle))
        return OF_REFUSED;
    if (!optfuse::await_arrivals(optfuse::ALL_GROUPS))
        return OF_REFUSED;
    const of_status status = drain ? of_plan_drain(plan->core) : of_plan_flush(plan->core);
    if (status != OF_OK || !optfuse::may_take_marks_off(plan))
        return status;
    // Where another thread is in step() or tells the plan something, marks go at their first use.
    const std::unique_lock<std::recursive_mutex> alone(plan->alone, std::try_to_lock);
    const std::unique_lock<std::recursive_mutex> telling(plan->telling, std::try_to_lock);
    of_counts now = {};
    of_plan_counts(plan->core, &now);
    *cleaned = alone && telling && clean_all(*plan) && now.in_flight == 0;
    return OF_OK;
}

int of_shim_await(int64_t group) {
    try {
        return optfuse::await_arrivals(group) ? OF_OK : OF_REFUSED;
    } catch (const std::exception &e) {
        return failed(e);
    }
}

void of_shim_set_cuda_library(const char *path) { optfuse::set_cuda_library(path); }

bool of_shim_unconfirmed(of_shim_plan *handle) {
    const optfuse::Plan *plan = plan_of(handle);
    return optfuse::is_updating_here(plan) || of_plan_unconfirmed(plan->core) != 0;
}

uint64_t of_shim_used(of_shim_plan *handle, size_t slot) {
    return of_shim_is_updated(handle, slot) ? plan_of(handle)->slots[slot]->used : 0;
}

bool of_shim_is_updated(of_shim_plan *handle, size_t slot) {
    const optfuse::Plan *plan = plan_of(handle);
    return optfuse::is_updating_here(plan) || of_plan_is_updated(plan->core, slot);
}

size_t of_shim_sharing_state(of_shim_plan *handle, size_t *slots, size_t capacity) {
    optfuse::Plan *plan = plan_of(handle);
    size_t n = 0;
    for (const optfuse::Slot *slot : plan->slots)
        if (n < capacity && optfuse::shares_state(*slot))
            slots[n++] = slot->index;
    return n;
}

void of_shim_update_beside(of_shim_plan *handle) { plan_of(handle)->beside = true; }

void of_shim_take_mixed(of_shim_plan *handle) { plan_of(handle)->takes_mixed = true; }

void of_shim_leave_stateless(of_shim_plan *handle, bool left) {
    plan_of(handle)->leaves_stateless = left;
}

void of_shim_promise_gradients(of_shim_plan *handle, bool forced) {
    plan_of(handle)->promising = forced ? optfuse::Promising::FORCED : optfuse::Promising::AUTO;
}

void of_shim_write_gradients(of_shim_plan *handle) { plan_of(handle)->folds = false; }

int64_t of_shim_wait_from(int64_t numel) { return optfuse::wait_from(numel); }

int of_shim_norms_tried(void) { return static_cast<int>(optfuse::norms_tried()); }

void of_shim_keep_promises(void) { optfuse::keep_all_promises(); }

bool of_shim_keep_memory(void) { return of_heap_keep(); }

bool of_shim_count_promises(of_shim_plan *handle, size_t i, of_shim_promise_counts *out) {
    const std::lock_guard<std::recursive_mutex> alone(plan_of(handle)->alone);
    const auto &layers = plan_of(handle)->promising_layers;
    if (i >= layers.size())
        return false;
    const auto &layer = *layers[i];
    const auto counts = layer.counts();
    *out = {layer.label().c_str(), counts.because, counts.promised, counts.panels, counts.made,
            counts.whole};
    return true;
}

void of_shim_add_only(of_shim_plan *handle, int entered) {
    of_plan_add_only(plan_of(handle)->core, entered);
}

void of_shim_restart_count(of_shim_plan *handle) { of_plan_restart_count(plan_of(handle)->core); }

void of_shim_stop_deferring(of_shim_plan *handle) { of_plan_stop_deferring(plan_of(handle)->core); }

int of_shim_counts(of_shim_plan *handle, of_counts *out) {
    if (refuses(handle))
        return OF_REFUSED;
    of_plan_counts(plan_of(handle)->core, out);
    return OF_OK;
}

const char *of_shim_isa(of_shim_plan *handle, int dtype) {
    return of_plan_isa(plan_of(handle)->core, static_cast<of_dtype>(dtype));
}

bool of_shim_is_profiled(void) { return at::hasCallbacks(); }

// An observer of samples may say no, and look at a later function.
bool of_shim_inputs_are_profiled(void) {
    const auto observers = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
    return observers.has_value() && observers->needs_inputs_;
}

void of_shim_seal_consumed(bool sealed) { optfuse::seal_consumed(sealed); }

} // extern "C"
