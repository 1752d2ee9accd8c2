// SPDX-License-Identifier: BSD-3-Clause
// first_use.cpp: a pending tensor carries one more dispatch key. The fallback
// registered for that key sees every operator that receives such a tensor,
// launches the pending update, takes the key off and passes the operator on.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/graph_task.h>

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "absent/consumed.h"
#include "absent/recompute.h"
#include "base/compat.h"
#include "base/error.h"
#include "guard.h"
#include "plan/plan.h"
#include "promises/operators.h"
#include "promises/promise.h"
#include "python/callback.h"
#include "python/gil.h"
#include "recorded/record.h"
#include "absent/awaited.h"
#include "host/first_use.h"
#include "memory/memory.h"
#include "memory/proxies.h"

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

bool reads_no_numbers(const std::string &op) {
    const std::string tail = "_like";
    return op.compare(0, 10, "aten::new_") == 0 ||
           (op.size() > tail.size() && op.compare(op.size() - tail.size(), tail.size(), tail) == 0);
}

// Before anything is launched: an update may be pending behind its gradient.
void refuse_if_too_early(const std::string &op, const c10::TensorImpl *impl) {
    const std::string label = updated_too_early(impl);
    if (label.empty() || reads_no_numbers(op))
        return;
    fail("optfuse: " + op + " reads " + label +
         " in a block that activation checkpointing computes once more inside backward(), but the "
         "parameter's gradient was complete before, and backward fusion has already updated it.\n"
         "Read it outside of the block and give it to the block as an argument, or use "
         "optfuse.fuse(optimizer, mode=\"forward\")");
}

// is_target: the tensor is the operator's first argument, or in it.
Answer use(const char *op, const at::Tensor &tensor, bool is_target) {
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    if (!has_mark(impl) || !impl->has_storage())
        return Answer::PASS;
    if (recorded::is_absent_elsewhere(storage_of(impl)))
        fail(std::string("optfuse: ") + op +
             " uses a tensor that a step() on another thread has made and not computed yet; read it "
             "on that thread before, by item() or numpy()");
    if (is_consumed(impl))
        return answer_consumed(op, impl, is_target);
    if (is_no_look(op, impl))
        return Answer::PASS;
    if (is_recomputing_here())
        refuse_if_too_early(op, impl);
    const bool stranger = called_by_stranger();
    const of_accessed accessed = access_without_gil(impl, stranger);
    if (accessed == OF_ACCESS_FAILED)
        raise_failure(op);
    // While a GPU may still run the update, other streams have to come here, too. The
    // key set is no atomic: only the threads that train write it.
    if (!stranger && accessed != OF_IN_FLIGHT && !marks_stay())
        unmark(impl);
    return Answer::PASS;
}

Answer use_value(const char *op, const c10::IValue &value, bool is_target) {
    if (value.isTensor())
        return use(op, value.toTensor(), is_target);
    Answer answer = Answer::PASS;
    if (value.isList())
        for (const c10::IValue &element : value.toListRef())
            if (element.isTensor())
                answer = std::max(answer, use(op, element.toTensor(), is_target));
    return answer;
}

void pass_on(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
    const auto &schema = op.schema();
    const char *name = schema.operator_name().name.c_str();
    const size_t n = schema.arguments().size();
    if (answer_with_promise(name, stack, n))
        return;
    const std::shared_ptr<PromisingLayer> embedding = promising_embedding(name, *stack, n);
    const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kPendingKey);
    Answer answer = Answer::PASS;
    if (transposes_in_backward(name, *stack, n)) {
        const c10::impl::ExcludeDispatchKeyGuard seen(kPendingKey); // its kernel calls others
        op.redispatchBoxed(below, stack);
        note_transposed(stack->back().toTensor());
        return;
    }
    for (size_t i = 0; i < n; i++)
        answer = std::max(answer, use_value(name, torch::jit::peek(*stack, i, n), i == 0));
    if (answer == Answer::PASS && answer_product_with_promise(name, stack, n))
        return;
    if (answer == Answer::CONVERT)
        convert_consumed(stack);
    else if (answer == Answer::OVERWRITE)
        overwrite_consumed(op, below, stack);
    else
        op.redispatchBoxed(below, stack);
    if (embedding)
        ask_behind_embedding(embedding, stack->back().toTensor());
}

void first_use(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
    if (recorded::Tape *tape = recorded::open_tape())
        recorded::record(tape, op, keys, stack, pass_on);
    else
        pass_on(op, keys, stack);
}

} // namespace

of_accessed use_memory(const c10::TensorImpl *impl, bool foreign, decltype(&of_access) how) {
    c10::StorageImpl *storage = storage_of(impl);
    if (how == of_access && (!keep_promise(storage) || !await_arrival(storage)))
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
