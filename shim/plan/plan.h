// SPDX-License-Identifier: BSD-3-Clause
// plan.h: what the shim knows of one optimizer: a Plan, with one Slot per parameter.
#pragma once

#include <ATen/core/Tensor.h>

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/compat.h"
#include "optfuse.h"
#include "plan/owner.h"
#include "plan/programs.h"
#include "shim.h"

namespace optfuse {

class DeviceScalars;
class PromisingLayer;
struct NativeInputs;
struct Plan;
struct Slot;
namespace recorded {
struct GradTable;
}

// Dtype and device of a parameter in one number, as _place_of() of _gpu.py; or that every
// place will do.
constexpr int64_t ANYWHERE = -1;

// How many steps of an optimizer have confirmed what backward fusion has done before them.
using Steps = std::atomic<uint64_t>;
// A number of a use of a consumed gradient (absent/consumed.h) that none has.
constexpr uint64_t kNoUse = 1;

// A tensor that an update writes, as it was at the beginning of a step().
struct Written {
    const c10::StorageImpl *storage;
    const c10::TensorImpl *tensor;
    size_t slot;
    enum Kind { STATE, GRADIENT, PARAM } kind;
};

// Backward mode, of a class whose step() is recorded: lines that wait for their parameter's gradient
// (recorded/ahead.h).
struct Lines {
    // Whether nobody but these, their owner and the core holds the memory of the parameter and its
    // state.
    virtual bool knows_all_users(const Slot &slot) const = 0;
    virtual void run(size_t slot, const at::Tensor &gradient) = 0;

  protected:
    ~Lines() = default;
};

enum class Promising { OFF, AUTO, FORCED }; // FORCED: of any size, at once; for tests

// The part of a slot that an update by a kernel reads, in as few cache lines as will do.
struct alignas(OF_CACHE_LINE) UsualSlot {
    Plan *plan = nullptr;
    size_t index = 0;
    // Borrowed: the owner keeps the parameter alive as long as the slot. A
    // reference from here would hide a cycle (parameter -> Python attribute or
    // hook -> optimizer) from Python's garbage collector, and even a weak one
    // makes torch.utils.swap_tensors refuse the parameter.
    c10::TensorImpl *param;
    at::Tensor state[OF_MAX_STATE];
    at::Tensor step;    // 0-dim tensor that counts updates, on the CPU or the
                        // parameter's device, or undefined
    // The place for which the update has passed a trial, where one is needed: on GPUs, and for
    // the dtypes of Plan::tried_on_cpu everywhere. Module.to() moves the parameter to another
    // place without anybody being told.
    int64_t tried = ANYWHERE;
    bool first = false; // rules without a counter: the next update is the first
    // Backward mode: the gradient that autograd completes is reduced between processes before
    // it is that of the update.
    bool reduced = false;
    // For a DTensor, whose local tensor is `param`: whether dtensor_gradients.cpp knows all users
    // of its gradient's memory, which is complete now; and other tensors that are known to use its
    // own.
    bool gradient_is_known = false;
    std::vector<at::Tensor> aliases;
    // The DTensors of the parameter, which comes first, and its state, which the loader keeps
    // alive.
    std::vector<c10::TensorImpl *> wrappers;
    const c10::StorageImpl *wrapped = nullptr; // for the updates of this memory they stand (proxies.h)
    at::Tensor consumed; // backward mode: what .grad becomes
    uint64_t used = kNoUse; // and the number of its last use, which step() confirms
    // Backward mode: param_version() and state_version() after the last update, or when they were
    // told since. Others mean that somebody has written.
    uint64_t version = 0;
    uint64_t state_version = 0;

    explicit UsualSlot(const at::Tensor &tensor) : param(tensor.unsafeGetTensorImpl()) {}
};

struct Slot : UsualSlot {
    size_t group = 0;
    std::string label; // how errors name the parameter
    at::Tensor counters[OF_MAX_COUNTERS]; // the rule's other 0-dim state, on the CPU or, if
                                          // of_rule.counts_on_gpu, the parameter's GPU
    c10::Storage counted; // backward mode: of a counter on a GPU, as the last update had it
    // The tensors of the state that an update by the host uses, in the order of the native update if
    // there is one.
    std::vector<at::Tensor> own;
    // Rules that run programs: that of the updates from here on.
    std::shared_ptr<const Program> program;
    const c10::TensorImpl *part = nullptr; // .grad, while it is a part of a bucket; compared only
    // An average behind the last update, if another thread has launched that and left the mark.
    WeakTensor marked_average{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
    std::shared_ptr<void> promising; // while it lives the gradient may be promised; or null
    // During step(): the DTensor of the gradient, as `wrappers` has that of the parameter.
    c10::TensorImpl *gradient_wrapper = nullptr;
    at::Tensor consumed_wrapper; // backward mode: what .grad of the DTensor becomes

    using UsualSlot::UsualSlot;
    ~Slot();
    Slot(const Slot &) = delete;
    Slot &operator=(const Slot &) = delete;
};

inline bool is_by_host(const Slot *slot) { return slot->program && slot->program->core.by_host; }

inline bool runs_own_step(const Slot *slot) { return slot->program && slot->program->is_own; }

inline bool runs_lines(const Slot *slot) { return is_by_host(slot) && !runs_own_step(slot); }

inline bool writes_gradient(const Slot *slot) {
    return slot->program && slot->program->writes_gradient();
}

// of_shim_plan is a Plan. Gradient hooks share it, so that it and its core
// outlive them; `self` is the loader's share.
struct Plan {
    Plan();
    ~Plan();
    std::shared_ptr<Plan> self;
    of_plan *core = nullptr;
    Owner *owner = nullptr; // outlives the plan, or has closed it
    std::shared_ptr<void> python; // the owner, if that is loader/reader.h's
    of_mode mode = OF_FORWARD;
    bool folds = true; // clipping and unscaling may leave gradients to the update
    const of_rule *rule = nullptr;
    bool (*native)(const NativeInputs &in) = nullptr; // backward mode: else the class's own step()
    std::vector<std::vector<double>> numbers; // its options, of each group
    std::vector<Slot *> slots;     // owned by the core, in its order
    // Slots, and the tensors that they know, change with one of these: with `alone` in step(),
    // zero_grad() and rebuild(), one of them at a time, which take it before all others; with
    // `telling` in what is told inside backward, which takes it before the GIL.
    std::recursive_mutex alone, telling;
    std::atomic<bool> closed{false};
    std::atomic<size_t> backwards{0};   // that did not only add
    // Counts step(), and the end of the plan: none of its consumed gradients waits after that.
    const std::shared_ptr<Steps> steps = std::make_shared<Steps>(0);
    std::atomic<bool> uses_heap{false}; // heap.h
    // The thread that called step() last: the one that may take marks off the
    // plan's tensors other than at their use.
    std::atomic<pthread_t> stepping{};
    // While updates of a launch are settled: may_take_marks_off(). The core's lock.
    bool takes_marks_off = false;
    const std::unique_ptr<DeviceScalars> scalars;
    std::shared_ptr<Lines> ahead;
    // The .grad of each parameter in the step() of a class that runs on one.
    std::shared_ptr<recorded::GradTable> grad_table;
    // In backward mode: all updates of this pass are left to step(), which the class takes by itself.
    std::atomic<bool> is_left{false};
    std::atomic<uint64_t> captured_into{0}; // the graph into which the last pass went; 0: none
    std::vector<at::Tensor> dying; // empty: room for what zero_grad() lets go
    // By storage, if this step() has asked for it (overlap.h). With `alone`.
    std::vector<Written> written;
    bool reduces = false; // some slots are: a pass waits for them at its end
    bool beside = false; // backward mode, on GPUs: updates go on a side stream
    Promising promising = Promising::OFF;
    // A parameter that is told anew goes on with that of its label.
    std::vector<std::shared_ptr<PromisingLayer>> promising_layers;
    int64_t tried_on_cpu = 0; // bit dtype: this release may round otherwise than our update
    // See of_shim_take_mixed() and of_shim_leave_stateless().
    bool takes_mixed = false;
    std::atomic<bool> leaves_stateless{false};
    // Bit dtype * 16 + state in use: these kernels have been loaded for a GPU; those that take
    // bfloat16 state.
    std::atomic<uint64_t> prepared[64] = {};
    std::atomic<uint64_t> prepared_mixed[64] = {};
    // Bit dtype: those that multiply gradients have been.
    std::atomic<uint32_t> prepared_scaling[64] = {};
};

// Visits the tensors that updates of the slot use beside its parameter and gradient.
template <class Visit> void each_state(const Slot &slot, const Visit &visit) {
    const of_rule *rule = slot.plan->rule;
    for (size_t i = 0; i < rule->n_state; i++)
        if (slot.state[i].defined())
            visit(slot.state[i]);
    for (size_t i = 0; i < rule->n_counters; i++)
        if (slot.counters[i].defined())
            visit(slot.counters[i]);
    if (slot.step.defined())
        visit(slot.step);
    for (const at::Tensor &tensor : slot.own)
        visit(tensor);
}

inline Plan *plan_of(of_shim_plan *handle) { return reinterpret_cast<Plan *>(handle); }
inline of_shim_plan *handle_of(Plan *plan) { return reinterpret_cast<of_shim_plan *>(plan); }

} // namespace optfuse
