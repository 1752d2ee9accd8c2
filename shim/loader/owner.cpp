// SPDX-License-Identifier: BSD-3-Clause
// owner.cpp: PythonOwner, an optimizer of Python as the owner of its plan: where Python calls (shim.h),
// and where the plan does.
#include <ATen/record_function.h>

#include "base/error.h"
#include "loader/reader.h"
#include "memory/gradient.h"
#include "shim.h"

namespace optfuse {

PythonOwner::PythonOwner(Plan &its, of_object *optimizer, of_object *link, of_object *losses)
    : ledger(its), plan(its), optimizer_ref(optimizer), link_ref(link), scaled(losses) {
    of_interpreter.keep(optimizer_ref);
    of_interpreter.keep(link_ref);
}

void PythonOwner::close() {
    const int state = of_interpreter.take_gil();
    for (of_object *const ref : {optimizer_ref, link_ref})
        of_interpreter.drop(ref);
    optimizer_ref = link_ref = nullptr;
    of_interpreter.give_gil(state);
}

bool PythonOwner::begin_backward(Plan *, bool only_adds) {
    return in_python([&] {
        PythonReader now(*this);
        if (!now.is_alive())
            return;
        now.check_pass(only_adds);
        if (only_adds)
            return;
        const Look look = now.look();
        const PythonReader::Gil given_up(now, false);
        ledger.begin_pass(now, look);
    });
}

bool PythonOwner::make_state(Plan *, size_t slot) {
    return in_python([&] {
        PythonReader now(*this);
        if (!now.is_alive())
            return;
        if (now.leaves_state())
            return; // the core finds that nothing is missing
        const PythonReader::Gil given_up(now, false);
        ledger.make_state(now, slot);
    });
}

bool PythonOwner::await_reduction(Plan *) {
    return in_python([&] {
        PythonReader now(*this);
        if (now.is_alive())
            now.await_reduction();
    });
}

bool PythonOwner::update(Plan *, size_t slot) {
    const auto work = [&] {
        PythonReader now(*this);
        now.check_alive();
        now.update(slot);
    };
    return in_python(work, &plan);
}

bool PythonOwner::update_final(Plan *, size_t slot) {
    const auto work = [&] {
        PythonReader now(*this);
        now.check_alive(); // else its gradient would be gone, and no update made
        if (now.is_by_class()) {
            now.update_alone(slot);
            return;
        }
        const PythonReader::Gil given_up(now, false);
        ledger.step_slot(now, slot, false);
    };
    return in_python(work, nullptr, true);
}

bool PythonOwner::end_backward(Plan *its) {
    const auto work = [&] {
        PythonReader now(*this);
        if (now.is_alive())
            now.end_pass();
    };
    return its->mode != OF_FINAL || in_python(work, nullptr, true);
}

namespace {

PythonOwner &owner_of(of_shim_plan *handle) {
    return *static_cast<PythonOwner *>(plan_of(handle)->python.get());
}

// Raises in Python what work(reader) throws.
template <typename Work> int raising(of_shim_plan *handle, void *optimizer, const Work &work) {
    const std::shared_ptr<Plan> alive = plan_of(handle)->self;
    try {
        PythonReader now(owner_of(handle), static_cast<of_object *>(optimizer));
        const int status = work(now);
        now.raise_held();
        return status;
    } catch (const RaisedInPython &) {
    } catch (const PythonError &e) {
        of_interpreter.raise(e.raises, e.what());
    } catch (const c10::Error &e) {
        of_interpreter.raise(PythonError::type, e.what_without_backtrace());
    } catch (const std::exception &e) {
        of_interpreter.raise(PythonError::type, e.what());
    }
    return OF_REFUSED;
}

} // namespace
} // namespace optfuse

using optfuse::owner_of;
using optfuse::PythonReader;

extern "C" {

void of_shim_ledger_open(of_shim_plan *handle, void *optimizer, void *link, void *scaled) {
    optfuse::Plan *plan = optfuse::plan_of(handle);
    const auto object = [](void *it) { return static_cast<of_object *>(it); };
    const auto made = std::make_shared<optfuse::PythonOwner>(*plan, object(optimizer),
                                                             object(link), object(scaled));
    plan->owner = made.get();
    plan->python = made;
}

int of_shim_ledger_rebuild(of_shim_plan *handle, void *optimizer) {
    return optfuse::raising(handle, optimizer, [&](PythonReader &now) {
        const PythonReader::Gil given_up(now, false);
        owner_of(handle).ledger.rebuild(now);
        return OF_OK;
    });
}

int of_shim_ledger_step(of_shim_plan *handle, void *optimizer, bool unless_watched) {
    // Called by the step() of another optimizer, which is recorded: our updates are no operators.
    if (of_shim_play_recorded(true, false) != OF_OK) {
        of_interpreter.raise(optfuse::PythonError::type, of_error_message());
        return OF_REFUSED;
    }
    if (unless_watched && at::hasCallbacks())
        return OF_SHIM_LEFT;
    return optfuse::raising(handle, optimizer, [&](PythonReader &now) {
        const optfuse::Look look = now.look();
        const PythonReader::Gil given_up(now, false);
        owner_of(handle).ledger.step(now, look);
        return OF_OK;
    });
}

int of_shim_ledger_step_slot(of_shim_plan *handle, void *optimizer, size_t slot) {
    return optfuse::raising(handle, optimizer, [&](PythonReader &now) {
        const PythonReader::Gil given_up(now, false);
        owner_of(handle).ledger.step_slot(now, slot, true);
        return OF_OK;
    });
}

int of_shim_ledger_zero_grad(of_shim_plan *handle, void *optimizer, bool may_drop) {
    return optfuse::raising(handle, optimizer, [&](PythonReader &now) {
        const bool same = now.has_same_params();
        const PythonReader::Gil given_up(now, false);
        const bool dropped =
            owner_of(handle).ledger.zero_grad(now, same, may_drop && !at::hasCallbacks());
        return dropped ? static_cast<int>(OF_OK) : OF_SHIM_LEFT;
    });
}

int of_shim_ledger_tell_options(of_shim_plan *handle, void *optimizer) {
    return optfuse::raising(handle, optimizer, [&](PythonReader &now) {
        const PythonReader::Gil given_up(now, false);
        owner_of(handle).ledger.tell_options(now);
        return OF_OK;
    });
}

void of_shim_ledger_forget_state(of_shim_plan *handle) {
    owner_of(handle).known.must_tell_state();
}

void of_shim_ledger_note_entry(of_shim_plan *handle, size_t slot, bool is_new) {
    optfuse::PythonOwner &owner = owner_of(handle);
    owner.known.has_made = true;
    if (is_new)
        owner.ledger.note_entry(slot);
}

bool of_shim_are_gradients(of_shim_plan *handle, void *slots, void *list) {
    const std::vector<optfuse::Slot *> &known = optfuse::plan_of(handle)->slots;
    auto *const numbers = static_cast<of_object *>(slots), *to = static_cast<of_object *>(list);
    for (ssize_t i = 0; i < of_interpreter.list_size(numbers); i++) {
        const auto slot = static_cast<size_t>(
            of_interpreter.number(of_interpreter.list_item(numbers, i)));
        if (slot >= known.size() || known[slot]->wrappers.empty())
            return false;
        const at::Tensor &grad = optfuse::gradient_of(known[slot]->wrappers[0]);
        void *const object = grad.defined() ? optfuse::python_object(*grad.unsafeGetTensorImpl())
                                            : of_interpreter.none;
        if (object == nullptr || of_interpreter.append(to, static_cast<of_object *>(object)) != 0)
            return false;
    }
    return true;
}

} // extern "C"
