// SPDX-License-Identifier: BSD-3-Clause
// first_use.cpp: a pending tensor carries one more dispatch key. The fallback
// registered for that key sees every operator that receives such a tensor,
// launches the pending update, takes the key off and passes the operator on.
#include <torch/csrc/autograd/graph_task.h>

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "base/compat.h"
#include "base/error.h"
#include "guard.h"
#include "host/first_use.h"
#include "memory/memory.h"
#include "memory/proxies.h"
#include "plan/plan.h"
#include "python/callback.h"
#include "python/gil.h"

namespace optfuse {
namespace {

thread_local bool steps_here = false;

bool called_by_engine() { return torch::autograd::get_current_graph_task_id() != -1; }

// Neither a thread that trains nor one of the engine's.
bool called_by_stranger() { return !steps_here && !called_by_engine(); }

of_accessed access_without_gil(c10::TensorImpl *impl, bool stranger) {
    const WithoutGil wait;
    return use_memory(impl, stranger);
}

// An interrupt that came while an optimizer's own step() ran stays one.
[[noreturn]] void raise_failure(const char *op) {
    fail(std::string("optfuse: ") + op + ": " + of_error_message(),
         std::exchange(raised_in_python, nullptr));
}

// Whether the storage's numbers are, or could be, of this kind: whether they are late a table knows.
bool fits(const Absent *kind, const c10::StorageImpl *storage) {
    return kind->deleter == nullptr || kind->deleter == data_ptr_of(storage).get_deleter();
}

// Returns the answer of the first kind that has one.
Run ask(const char *op, c10::TensorImpl *impl, bool is_target) {
    for (const Absent *kind : absent_kinds)
        if (kind->answer != nullptr && fits(kind, storage_of(impl)))
            if (const Run run = kind->answer(op, impl, is_target))
                return run;
    return nullptr;
}

bool make(c10::StorageImpl *storage) {
    for (const Absent *kind : absent_kinds)
        if (kind->make != nullptr && fits(kind, storage) && !kind->make(storage))
            return false;
    return true;
}

// Whether a kind has run the operator.
bool is_run_by_kind(bool (*Absent::*way)(const OperatorCall &call), const OperatorCall &call) {
    for (const Absent *kind : absent_kinds)
        if (kind->*way != nullptr && (kind->*way)(call))
            return true;
    return false;
}

// is_target: the tensor is the operator's first argument, or in it. Returns how the operator runs where
// that is in a way of its own.
Run use(const char *op, const at::Tensor &tensor, bool is_target) {
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    if (!has_mark(impl) || !impl->has_storage())
        return nullptr;
    if (const Run run = ask(op, impl, is_target))
        return run == go_on ? nullptr : run;
    const bool stranger = called_by_stranger();
    const of_accessed accessed = access_without_gil(impl, stranger);
    if (accessed == OF_ACCESS_FAILED)
        raise_failure(op);
    // While a GPU may still run the update, other streams have to come here, too. The
    // key set is no atomic: only the threads that train write it.
    if (!stranger && accessed != OF_IN_FLIGHT && !marks_stay())
        unmark(impl);
    return nullptr;
}

Run use_value(const char *op, const c10::IValue &value, bool is_target) {
    if (value.isTensor())
        return use(op, value.toTensor(), is_target);
    Run run = nullptr;
    if (value.isList())
        for (const c10::IValue &element : value.toListRef())
            if (element.isTensor())
                if (const Run its = use(op, element.toTensor(), is_target))
                    run = its;
    return run;
}

void first_use(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
    use_marked({op, keys, stack});
}

} // namespace

void use_marked(const OperatorCall &call) {
    if (is_run_by_kind(&Absent::begin, call))
        return;
    const char *name = call.name();
    Run run = nullptr;
    for (size_t i = 0, n = call.n(); i < n; i++)
        if (const Run its = use_value(name, torch::jit::peek(*call.stack, i, n), i == 0))
            run = its;
    if (run != nullptr)
        run(call);
    else if (!is_run_by_kind(&Absent::end, call))
        call.go_on();
}

of_accessed use_memory(const c10::TensorImpl *impl, bool foreign, decltype(&of_access) how) {
    c10::StorageImpl *storage = storage_of(impl);
    if (how == of_access && !make(storage))
        return OF_ACCESS_FAILED;
    of_accessed accessed = how(storage, foreign);
    if (accessed == OF_NOTHING_PENDING)
        for (const c10::StorageImpl *key : keys_of_proxy(impl))
            accessed = std::max(accessed, how(key, foreign));
    return accessed;
}

void note_stepping_thread() { steps_here = true; }

bool may_take_marks_off(const Plan *plan) {
    return pthread_equal(plan->stepping.load(std::memory_order_relaxed), pthread_self()) != 0 &&
           !called_by_engine() && !marks_stay();
}

int register_first_use() {
    auto &dispatcher = c10::Dispatcher::singleton();
    if (dispatcher.hasBackendFallbackForDispatchKey(kPendingKey)) {
        of_set_error("another library has registered a fallback for PyTorch's dispatch key %s, "
                     "which optfuse needs for pending updates; import only one of the two",
                     c10::toString(kPendingKey));
        return OF_REFUSED;
    }
    // Never unregistered: pending tensors may live until the process ends.
    new c10::RegistrationHandleRAII(dispatcher.registerFallback(
        kPendingKey, c10::KernelFunction::makeFromBoxedFunction<&first_use>(), "optfuse"));
    return OF_OK;
}

} // namespace optfuse
