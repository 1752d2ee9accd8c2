// SPDX-License-Identifier: BSD-3-Clause
// step.cpp: calls an optimizer's own step() and records it. Recording begins and ends here, whatever
// step() raises, an interrupt too.
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstring>
#include <string>
#include <utility>

#include "error.h"
#include "guard.h"
#include "python/interpreter.h"
#include "recorded/tape.h"
#include "shim.h"
#include "tensor/first_use.h"

namespace optfuse::recorded {
namespace {

thread_local Tape *open = nullptr;

// As long as one exists, the operators of this thread come to record(), but for those inside of another.
class Recording {
  public:
    Recording() {
        tape.begin();
        open = &tape;
        c10::impl::tls_set_dispatch_key_included(kPendingKey, true);
    }
    ~Recording() {
        end();
        open = nullptr;
    }
    static void end() { c10::impl::tls_set_dispatch_key_included(kPendingKey, false); }
    Recording(const Recording &) = delete;
    Recording &operator=(const Recording &) = delete;

    static thread_local Tape tape;
};

thread_local Tape Recording::tape;

// The lines run without the GIL, which some operators take.
class GilGivenUp {
  public:
    GilGivenUp() : thread(of_interpreter.save_thread()) {}
    ~GilGivenUp() { of_interpreter.restore_thread(thread); }
    GilGivenUp(const GilGivenUp &) = delete;
    GilGivenUp &operator=(const GilGivenUp &) = delete;

  private:
    void *const thread;
};

// Recorded tensors live until the lines run: for Python's collector of cycles a reason to look at all
// objects, again and again.
class NoCollection {
  public:
    NoCollection() : was_on(of_interpreter.pause_gc() != 0) {}
    ~NoCollection() {
        if (was_on)
            of_interpreter.resume_gc();
    }
    NoCollection(const NoCollection &) = delete;
    NoCollection &operator=(const NoCollection &) = delete;

  private:
    const bool was_on;
};

thread_local Counts last = {};

// False: this thread's error says why.
bool play_now() {
    if (open == nullptr || open->is_empty())
        return true;
    const GilGivenUp given_up;
    return answers([] { open->play(); });
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

// Lines refer to tensors, and a tensor to the memory that it has then.
int play_and_set_data(of_object *self, of_object *value, void *closure) {
    if (!OF_GUARD(recorded_data) || play_now())
        return set_data(self, value, closure);
    of_interpreter.raise(PythonError::type, of_error_message());
    return -1;
}

of_object *call_recorded(of_object *step, of_object *arguments, of_object *keywords) {
    of_object *result = nullptr, *type = nullptr, *value = nullptr, *trace = nullptr;
    std::string failed;
    {
        const NoCollection paused;
        Recording recording;
        note_stepping_thread();
        result = of_interpreter.call_with(step, arguments, keywords);
        of_interpreter.fetch(&type, &value, &trace);
        {
            const GilGivenUp given_up;
            // Operators before an exception have run, as in stock.
            if (!answers([&] { recording.tape.play(); }))
                failed = of_error_message();
        }
        last = recording.tape.counts;
        Recording::tape.drop_garbage();
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

} // namespace

Tape *open_tape() { return open; }

} // namespace optfuse::recorded

of_object *of_shim_recorded_step(of_object *step, of_object *arguments, of_object *keywords) {
    if (optfuse::recorded::open != nullptr) // another optimizer's step() has called this one
        return of_interpreter.call_with(step, arguments, keywords);
    return optfuse::recorded::call_recorded(step, arguments, keywords);
}

bool of_shim_is_recording(void) {
    return optfuse::recorded::open != nullptr &&
           c10::impl::tls_is_dispatch_key_included(optfuse::kPendingKey);
}

int of_shim_play_recorded(bool ends) {
    if (!optfuse::recorded::play_now())
        return OF_REFUSED;
    if (ends && of_shim_is_recording())
        optfuse::recorded::Recording::end();
    return OF_OK;
}

int of_shim_watch_data(void *attribute, size_t head_bytes) {
    using optfuse::recorded::Attribute;
    Attribute *its; // behind the object's head, its class and two names
    std::memcpy(&its, static_cast<char *>(attribute) + head_bytes + 3 * sizeof(void *), sizeof its);
    if (std::strcmp(its->name, "data") != 0 || its->set == nullptr) {
        of_set_error("Tensor.data is changed in a way that optfuse does not know");
        return OF_REFUSED;
    }
    if (optfuse::recorded::set_data == nullptr)
        optfuse::recorded::set_data =
            std::exchange(its->set, optfuse::recorded::play_and_set_data);
    return OF_OK;
}

void of_shim_recorded_counts(int64_t counts[5]) {
    const optfuse::recorded::Counts &last = optfuse::recorded::last;
    int64_t i = 0;
    for (const int64_t n : {last.lines, last.plays, last.at_once, last.groups, last.calls})
        counts[i++] = n;
}
