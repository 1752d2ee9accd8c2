// SPDX-License-Identifier: BSD-3-Clause
// backward.cpp: backward fusion. What a complete gradient leads to: an update at
// once, or, of a small parameter on the CPU, one together with its neighbours.
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>
#include <vector>

#include "compat.h"
#include "error.h"
#include "guard.h"
#include "tensor/memory.h"
#include "tensors.h"

namespace optfuse {

bool is_closed(const Plan *plan) {
    return plan->closed.load(std::memory_order_acquire);
}

namespace {

// Small parameters are updated together when they have so many bytes: enough for several
// threads, and with gradients and state about what the own caches of two cores hold.
constexpr size_t kTogether = size_t{512} << 10;

std::string label_of(const Plan *plan, size_t slot) {
    return slot < plan->slots.size() ? plan->slots[slot]->label : "a parameter";
}

[[noreturn]] void fail() { throw Error(std::string("optfuse: ") + of_error_message()); }

void check(const Plan *plan, size_t slot, int status) {
    if (status == OF_OK || is_closed(plan))
        return;
    const std::string text = of_error_message();
    const std::string label = label_of(plan, slot);
    throw Error("optfuse: " + (text.find(label) == std::string::npos ? label + ": " + text : text));
}

int ask(Plan *plan, of_shim_event event, size_t slot) {
    const int answer = ask_python(plan, event, slot);
    if (answer != 0)
        return answer;
    if (raised_in_python != nullptr)
        throw Error(of_error_message(), raised_in_python);
    fail();
}

void refuse_later_reduction(const Plan *plan, size_t slot, const at::Tensor &param) {
    if (!OF_GUARD(ddp))
        return;
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(param);
    if (accumulator && !accumulator->post_hooks().empty())
        throw Error("optfuse: the gradient of " + label_of(plan, slot) +
                    " is changed after it is complete (DistributedDataParallel reduces it "
                    "between processes), so backward fusion would use the wrong one; use "
                    "optfuse.fuse(optimizer, mode=\"forward\")");
}

// Between the pass that updated this parameter and step(): the gradient would
// be left for a later step, where stock applies it with this one.
void refuse_late_addition(const Plan *plan, size_t slot) {
    if (OF_GUARD(added_late) && of_plan_is_updated(plan->core, slot))
        throw Error("optfuse: a backward pass that only adds gradients came after the one that "
                    "updated " + label_of(plan, slot) + "; call step() first, or use "
                    "optfuse.fuse(optimizer, mode=\"forward\")");
}

// The gradient itself, as a variable of the user's, or its memory, as the buffer that it is a
// part of. Autograd's own references are gone when the hook is called. Sparse ones, which are
// refused, have no memory here.
bool is_gradient_shared(const at::Tensor &grad) {
    const c10::TensorImpl *g = grad.unsafeGetTensorImpl();
    if (grad.use_count() > 1 + idle_references(*g))
        return true;
    c10::StorageImpl *memory = storage_of(g);
    return memory != nullptr && OF_GUARD(buffer) && !is_private(memory, 0);
}

// The parameter's memory (to another parameter, a graph that is kept, an alias of
// the user's) or its gradient is known to others.
// That is left to step(): then others see it change when, and parameters that overlap in
// the order in which, stock changes it.
bool is_left_to_step(const at::Tensor &param) {
    if (!OF_GUARD(postpone))
        return false;
    const at::Tensor &grad = param.grad();
    return !is_private(storage_of(param.unsafeGetTensorImpl()), 0) ||
           (grad.defined() && is_gradient_shared(grad));
}

void update_alone(Plan *plan, size_t slot) {
    int status = of_plan_gradient(plan->core, slot);
    if (status == OF_NEEDS_STATE) {
        ask(plan, OF_SHIM_STATE, slot);
        status = of_plan_gradient(plan->core, slot);
    }
    check(plan, slot, status);
}

void update_together(Plan *plan, Waiting::Batch *batch) {
    const std::vector<size_t> &slots = batch->slots;
    std::vector<size_t> &which = batch->which;
    which.resize(slots.size());
    size_t n = 0;
    int status = of_plan_gradients(plan->core, slots.data(), slots.size(), which.data(), &n);
    if (status == OF_NEEDS_STATE) {
        for (size_t i = 0; i < n; i++)
            ask(plan, OF_SHIM_STATE, which[i]);
        status = of_plan_gradients(plan->core, slots.data(), slots.size(), which.data(), &n);
    }
    if (status != OF_OK && n == 0 && !is_closed(plan))
        fail();
    check(plan, which[0], status);
    for (size_t i = 0; i < n; i++)
        update_alone(plan, which[i]);
}

void run_waiting(Plan *plan, int task) {
    Waiting::Batch batch = plan->waiting.take(task);
    for (const Waiting::One &one : batch.all) {
        refuse_later_reduction(plan, one.slot, one.param);
        if (!is_left_to_step(one.param))
            batch.slots.push_back(one.slot);
    }
    if (batch.slots.size() == 1)
        update_alone(plan, batch.slots[0]);
    else if (!batch.slots.empty())
        update_together(plan, &batch);
    plan->waiting.reuse(std::move(batch));
}

// What all threads would work on by itself has no reason to wait, unless the user says so.
bool is_small(const Plan *plan, const c10::TensorImpl *p, size_t bytes) {
    return plan->bucket_bytes == 0 ? p->numel() < OF_SERIAL_ELEMENTS : bytes < plan->bucket_bytes;
}

// How many bytes have to wait until they go. What is large goes at once and takes those along
// that wait: their gradients, made beside its own, would lie in the way when the next one of
// its size needs memory, and keep it from that which is still in the cache.
size_t enough_for(const Plan *plan, bool small) {
    if (!small)
        return 0;
    return plan->bucket_bytes == 0 ? kTogether : plan->bucket_bytes;
}

// False: the update has to be made at once, or a second gradient refused.
bool wait(Plan *plan, size_t slot, const at::Tensor &param, int task) {
    if (is_closed(plan) || !param.device().is_cpu() || plan->rule->by_host ||
        of_plan_is_updated(plan->core, slot))
        return false;
    const size_t bytes = static_cast<size_t>(param.numel()) * param.dtype().itemsize();
    const bool small = is_small(plan, param.unsafeGetTensorImpl(), bytes);
    if (plan->waiting.add({slot, param}, bytes, task, enough_for(plan, small)))
        run_waiting(plan, task);
    return true;
}

// One backward pass. When its graph task goes, it has ended or failed; then what still
// waits is left to step(), as all of it is in stock.
class Pass {
  public:
    Pass(std::shared_ptr<Plan> of, int graph_task) : plan(std::move(of)), task(graph_task) {}
    ~Pass() { plan->waiting.end(task); }
    Pass(const Pass &) = delete;
    Pass &operator=(const Pass &) = delete;
    void end() {
        if (is_closed(plan.get()) || plan->waiting.kind_of(task) == Waiting::ADDS)
            return;
        run_waiting(plan.get(), task);
        if (of_plan_close(plan->core) != OF_OK)
            fail();
    }

  private:
    const std::shared_ptr<Plan> plan;
    const int task;
};

void keep_heap(Plan *plan, bool is_second) {
    if (is_second) {
        of_heap_use();
        plan->uses_heap.store(true, std::memory_order_release);
    }
    if (plan->uses_heap.load(std::memory_order_acquire))
        of_heap_begin_backward();
}

Waiting::Kind begin_backward(const std::shared_ptr<Plan> &plan, size_t first,
                             const at::Tensor &param, int task) {
    if (OF_GUARD(create_graph) && c10::GradMode::is_enabled())
        throw Error("optfuse: backward(create_graph=True) needs the weights and gradients "
                    "of this backward later, but backward fusion updates them at once (seen at " +
                    label_of(plan.get(), first) +
                    "); use optfuse.fuse(optimizer, mode=\"forward\")");
    const bool adds = ask(plan.get(), OF_SHIM_BACKWARD, first) == OF_SHIM_ADDS;
    const Waiting::Kind kind = adds ? Waiting::ADDS : Waiting::UPDATES;
    if (!plan->waiting.begin(task, kind))
        return kind;
    auto pass = std::make_shared<Pass>(plan, task);
    const bool is_second =
        !adds && plan->backwards.fetch_add(1, std::memory_order_relaxed) == 1;
    if (!adds && param.device().is_cpu())
        keep_heap(plan.get(), is_second);
    torch::autograd::Engine::get_default_engine().queue_callback(
        [pass = std::move(pass)] { pass->end(); });
    return kind;
}

} // namespace

// Python may end the plan meanwhile.
void gradient_is_complete(const std::shared_ptr<Plan> &plan, size_t slot, const at::Tensor &param) {
    if (plan->adding.load(std::memory_order_acquire)) {
        refuse_late_addition(plan.get(), slot);
        return;
    }
    const int task = torch::autograd::get_current_graph_task_id();
    Waiting::Kind kind = plan->waiting.kind_of(task);
    if (kind == Waiting::NOT_BEGUN)
        kind = begin_backward(plan, slot, param, task);
    if (kind == Waiting::ADDS) {
        refuse_late_addition(plan.get(), slot);
        return;
    }
    if (wait(plan.get(), slot, param, task))
        return;
    refuse_later_reduction(plan.get(), slot, param);
    if (!is_left_to_step(param))
        update_alone(plan.get(), slot);
}

} // namespace optfuse
