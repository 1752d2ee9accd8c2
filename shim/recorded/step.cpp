// SPDX-License-Identifier: BSD-3-Clause
// step.cpp: calls an optimizer's own step() and records it. Recording begins and ends here, whatever
// step() raises, an interrupt too.
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "guard.h"
#include "host/first_use.h"
#include "plan/plan.h"
#include "python/interpreter.h"
#include "recorded/ahead.h"
#include "recorded/tape.h"
#include "shim.h"

namespace optfuse::recorded {

// The .grad of each parameter of an optimizer in its step(), where not all gradients are there (ahead.h),
// or where step() runs on one parameter (shim.h, of_shim_step_alone()).
struct GradTable {
    ska::flat_hash_map<const of_object *, of_object *> gradients;
    of_object *dropped = nullptr; // a list of parameters whose .grad step() has set to None; or null
    int64_t n_looks = 0; // at parameters without a gradient
};

namespace {

thread_local Tape *open = nullptr;

// As long as one exists, the operators of this thread come to record(), but for those inside of another.
class Recording : Pinned {
  public:
    Recording(Tape *tape, Tape::Kind kind) {
        tape->begin(kind);
        open = tape;
        c10::impl::tls_set_dispatch_key_included(kPendingKey, true);
    }
    ~Recording() {
        end();
        open = nullptr;
    }
    static void end() { c10::impl::tls_set_dispatch_key_included(kPendingKey, false); }
};

thread_local Tape tape_here;

// The lines run without the GIL, which some operators take.
class GilGivenUp : Pinned {
  public:
    GilGivenUp() : thread(of_interpreter.save_thread()) {}
    ~GilGivenUp() { of_interpreter.restore_thread(thread); }

  private:
    void *const thread;
};

// Recorded tensors live until the lines run: for Python's collector of cycles a reason to look at all
// objects, again and again.
class NoCollection : Pinned {
  public:
    NoCollection() : was_on(of_interpreter.pause_gc() != 0) {}
    ~NoCollection() {
        if (was_on)
            of_interpreter.resume_gc();
    }

  private:
    const bool was_on;
};

thread_local Counts last = {};

// For what can't be done before its gradients are there. False: this thread's error says why.
bool play_for(const char *what) {
    const GilGivenUp given_up;
    return answers([what] {
        open->meets(what);
        open->play();
    });
}

// That of this thread, as Python's exception.
void raise_error() {
    of_interpreter.raise(PythonError::type, ("optfuse: " + std::string(of_error_message())).c_str());
}

// PyGetSetDef
struct Attribute {
    const char *name;
    of_object *(*get)(of_object *self, void *closure);
    int (*set)(of_object *self, of_object *value, void *closure);
    const char *doc;
    void *closure;
};

int (*set_data)(of_object *self, of_object *value, void *closure) = nullptr;
int (*set_grad)(of_object *self, of_object *value, void *closure) = nullptr;
of_object *(*get_grad)(of_object *self, void *closure) = nullptr;

// Lines refer to tensors, and a tensor to the memory that it has then.
int play_and_set_data(of_object *self, of_object *value, void *closure) {
    if (!OF_GUARD(recorded_data) || open == nullptr || play_for("sets .data"))
        return set_data(self, value, closure);
    raise_error();
    return -1;
}

thread_local GradTable *grad_table = nullptr;

// As long as one exists, .grad is that.
class WithGradients : Pinned {
  public:
    explicit WithGradients(GradTable *its) : before(std::exchange(grad_table, its)) {}
    ~WithGradients() { grad_table = before; }

  private:
    GradTable *const before;
};

int note_and_set_grad(of_object *self, of_object *value, void *closure) {
    const bool drops = value == nullptr || value == of_interpreter.none;
    if (grad_table != nullptr && drops && grad_table->gradients.count(self) != 0) {
        grad_table->gradients[self] = of_interpreter.none;
        of_object *const dropped = grad_table->dropped;
        return dropped == nullptr ? 0 : of_interpreter.append(dropped, self);
    }
    if (open == nullptr || drops || answers([] { open->meets("sets .grad"); }))
        return set_grad(self, value, closure);
    raise_error();
    return -1;
}

of_object *get_grad_by_table(of_object *self, void *closure) {
    if (grad_table != nullptr) {
        const auto found = grad_table->gradients.find(self);
        if (found != grad_table->gradients.end()) {
            grad_table->n_looks += found->second == of_interpreter.none;
            of_interpreter.keep(found->second);
            return found->second;
        }
    }
    return get_grad(self, closure);
}

of_object *(*get_version)(of_object *self, void *closure) = nullptr;

// Lines that have not run have counted nothing.
of_object *note_and_get_version(of_object *self, void *closure) {
    if (open == nullptr || answers([] { open->meets("reads ._version"); }))
        return get_version(self, closure);
    raise_error();
    return nullptr;
}

// finish: with what step() has recorded, without the GIL. is_done: step() has raised nothing.
of_object *call_recorded(Tape *tape, Tape::Kind kind, of_object *step, of_object *arguments,
                         of_object *keywords, const std::function<void(bool is_done)> &finish) {
    of_object *result = nullptr, *type = nullptr, *value = nullptr, *trace = nullptr;
    std::string failed;
    {
        const NoCollection paused;
        const Recording recording(tape, kind);
        note_stepping_thread();
        result = of_interpreter.call_with(step, arguments, keywords);
        of_interpreter.fetch(&type, &value, &trace);
        {
            const GilGivenUp given_up;
            if (!answers([&] { finish(type == nullptr); }))
                failed = of_error_message();
        }
        last = tape->counts;
        tape->drop_garbage();
    }
    if (type == nullptr && !failed.empty()) {
        of_interpreter.drop(result);
        result = nullptr;
        of_interpreter.raise(PythonError::type, ("optfuse: step() failed: " + failed).c_str());
    } else {
        of_interpreter.restore(type, value, trace);
    }
    return result;
}

// Null: this thread's error says why. object: PyGetSetDescrObject, of Tensor.
Attribute *attribute_at(void *object, const char *name, size_t head_bytes) {
    Attribute *its; // behind the object's head, its class and two names
    std::memcpy(&its, static_cast<char *>(object) + head_bytes + 3 * sizeof(void *), sizeof its);
    if (std::strcmp(its->name, name) == 0 && its->get != nullptr)
        return its;
    of_set_error("Tensor.%s is changed in a way that optfuse does not know", name);
    return nullptr;
}

} // namespace

Tape *open_tape() { return open; }

} // namespace optfuse::recorded

of_object *of_shim_recorded_step(of_shim_plan *handle, of_object *step, of_object *arguments,
                                 of_object *keywords) {
    using namespace optfuse::recorded;
    if (open != nullptr) // another optimizer's step() has called this one
        return of_interpreter.call_with(step, arguments, keywords);
    Ahead *const ahead = handle == nullptr ? nullptr : &ahead_of(*optfuse::plan_of(handle));
    if (ahead != nullptr)
        ahead->begin_watched(*optfuse::plan_of(handle), &tape_here);
    const auto kind = ahead == nullptr ? Tape::Kind::PLAIN : Tape::Kind::WATCHED;
    // Operators before an exception have run, as in stock.
    return call_recorded(&tape_here, kind, step, arguments, keywords, [&](bool is_done) {
        if (ahead != nullptr)
            ahead->end_watched(*optfuse::plan_of(handle), tape_here);
        if (ahead != nullptr && !is_done)
            ahead->why = "raised an exception";
        tape_here.play();
        tape_here.drop_garbage(); // it has aliases of gradients
        if (ahead != nullptr)
            ahead->look_for_kept(*optfuse::plan_of(handle));
    });
}

of_object *of_shim_step_ahead(of_shim_plan *handle, of_object *step, of_object *arguments,
                              of_object *params, of_object *gradients, of_object *dropped) {
    using namespace optfuse::recorded;
    Ahead *const ahead = &ahead_of(*optfuse::plan_of(handle));
    GradTable table;
    table.dropped = dropped;
    for (ssize_t i = 0; i < of_interpreter.list_size(params); i++)
        table.gradients[of_interpreter.list_item(params, i)] =
            of_interpreter.list_item(gradients, i);
    const c10::AutoGradMode as_in_step(true);
    const c10::OptionalDeviceGuard on_its_device(ahead->device);
    const WithSettings as_last(ahead->device ? ahead->of_step : Settings());
    const WithGradients so(&table);
    return call_recorded(
        ahead->tape(), Tape::Kind::AHEAD, step, arguments, nullptr, [&](bool is_done) {
            if (is_done)
                ahead->end_step(*optfuse::plan_of(handle));
            else
                ahead->fail_step();
        });
}

void of_shim_hide_gradients(of_shim_plan *handle, of_object *params) {
    using namespace optfuse::recorded;
    auto &table = optfuse::plan_of(handle)->grad_table;
    if (!table)
        table = std::make_shared<GradTable>();
    table->gradients.clear();
    for (ssize_t i = 0; i < of_interpreter.list_size(params); i++)
        table->gradients[of_interpreter.list_item(params, i)] = of_interpreter.none;
}

of_object *of_shim_step_alone(of_shim_plan *handle, of_object *step, of_object *arguments,
                              of_object *param) {
    using namespace optfuse::recorded;
    GradTable *const table = optfuse::plan_of(handle)->grad_table.get();
    table->gradients.erase(param); // what step() does to its .grad is what it does in stock
    const WithGradients so(table);
    of_object *const result = of_interpreter.call_with(step, arguments, nullptr);
    table->gradients[param] = of_interpreter.none;
    return result;
}

int64_t of_shim_looks_in_vain(of_shim_plan *handle) {
    const auto &table = optfuse::plan_of(handle)->grad_table;
    return table ? table->n_looks : 0;
}

bool of_shim_is_recording(void) {
    return optfuse::recorded::open != nullptr &&
           c10::impl::tls_is_dispatch_key_included(optfuse::kPendingKey);
}

int of_shim_play_recorded(bool ends, bool orders) {
    using namespace optfuse::recorded;
    if (open != nullptr && orders && !play_for("waits for streams or a backward pass"))
        return OF_REFUSED;
    if (open != nullptr && !open->is_empty() &&
        !play_for("looks at numbers past PyTorch's operators"))
        return OF_REFUSED;
    if (ends && of_shim_is_recording()) {
        if (!play_for("calls compiled code")) // which comes to no tape
            return OF_REFUSED;
        Recording::end();
    }
    return OF_OK;
}

int of_shim_watch_attributes(void *data, void *grad, void *version, size_t head_bytes) {
    using namespace optfuse::recorded;
    Attribute *const of_data = attribute_at(data, "data", head_bytes);
    Attribute *const of_grad = attribute_at(grad, "grad", head_bytes);
    Attribute *const of_version = attribute_at(version, "_version", head_bytes);
    if (of_data == nullptr || of_grad == nullptr || of_version == nullptr)
        return OF_REFUSED;
    if (set_data == nullptr) {
        set_data = std::exchange(of_data->set, play_and_set_data);
        get_version = std::exchange(of_version->get, note_and_get_version);
        set_grad = std::exchange(of_grad->set, note_and_set_grad);
        get_grad = std::exchange(of_grad->get, get_grad_by_table);
    }
    return OF_OK;
}

void of_shim_recorded_counts(int64_t counts[5]) {
    const optfuse::recorded::Counts &last = optfuse::recorded::last;
    int64_t i = 0;
    for (const int64_t n : {last.lines, last.plays, last.at_once, last.groups, last.calls})
        counts[i++] = n;
}
