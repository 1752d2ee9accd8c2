// SPDX-License-Identifier: BSD-3-Clause
// callback.cpp: the way from the library into Python.
#include <signal.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <string>

#include "base/error.h"
#include "base/pinned.h"
#include "guard.h"
#include "python/callback.h"
#include "python/interpreter.h"

namespace optfuse {

thread_local _object *raised_in_python = nullptr;
thread_local std::string text_of_raised;

namespace {

// An exception may be on its way already, where an update runs because a tensor dies.
class Gil : Pinned {
  public:
    Gil() : state(of_interpreter.take_gil()) { of_interpreter.fetch(&type, &value, &trace); }
    ~Gil() {
        of_interpreter.restore(type, value, trace);
        of_interpreter.give_gil(state);
    }

  private:
    const int state;
    _object *type, *value, *trace;
};

volatile sig_atomic_t interrupted = 0;

void note_interrupt(int) {
    interrupted = 1;
}

bool is_main_thread() {
    // As a system call: the oldest C library that PyTorch runs with has no gettid().
    static thread_local const bool is_main = getpid() == syscall(SYS_gettid);
    return is_main;
}

// An interrupt in the middle of an update that Python makes would leave the update half done.
// The interrupt comes afterwards, before the next line of the program, as it does where C++
// runs for long.
class HeldInterrupts : Pinned {
  public:
    HeldInterrupts()
        : held(is_main_thread() && sigaction(SIGINT, nullptr, &before) == 0 &&
               OF_GUARD(interrupts)) {
        held = held && before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN &&
               before.sa_handler != note_interrupt;
        if (!held)
            return;
        struct sigaction note = {};
        note.sa_handler = note_interrupt;
        note.sa_flags = SA_RESTART;
        sigaction(SIGINT, &note, nullptr);
    }
    ~HeldInterrupts() {
        if (!held)
            return;
        sigaction(SIGINT, &before, nullptr);
        if (interrupted == 0)
            return;
        interrupted = 0;
        raise(SIGINT);
    }

  private:
    bool held;
    struct sigaction before;
};

std::string utf8_of(_object *text) {
    const char *utf8 = text == nullptr ? nullptr : of_interpreter.utf8(text, nullptr);
    return utf8 == nullptr ? "" : utf8;
}

std::string text_of(_object *made) {
    const std::string text = utf8_of(made);
    if (made != nullptr)
        of_interpreter.drop(made);
    of_interpreter.clear();
    return text;
}

// Whether type(text) is an exception.
bool can_make(_object *type, const std::string &text) {
    _object *const made = of_interpreter.call(type, "s", text.c_str());
    if (made != nullptr)
        of_interpreter.drop(made);
    of_interpreter.clear();
    return made != nullptr;
}

// as_it_is: keep the type of the exception. Else an error arrives as optfuse.Error, and an
// interrupt by its own type.
void take_exception(bool as_it_is) {
    const of_python &p = of_interpreter;
    _object *type = nullptr, *value = nullptr, *trace = nullptr;
    p.fetch(&type, &value, &trace);
    p.normalize(&type, &value, &trace);
    std::string text = text_of(p.str(value));
    const bool is_error = p.matches(type, *p.exception) != 0;
    const bool is_ours = p.matches(type, PythonError::type) != 0;
    if (!is_error || (as_it_is && !is_ours && can_make(type, text))) {
        raised_in_python = type;
        text_of_raised = text;
        p.keep(type); // for ever: nobody knows for how long it is needed
        if (is_error && as_it_is)
            text = text_of(p.attribute(type, "__name__")) + ": " + text;
    } else if (!is_ours) {
        text = text_of(p.attribute(type, "__name__")) + ": " + text;
    } else if (text.rfind("optfuse: ", 0) == 0) {
        text.erase(0, 9);
    }
    of_set_error("%s", text.c_str());
    for (_object *object : {type, value, trace})
        if (object != nullptr)
            p.drop(object);
}

// Runs the handlers of signals that came before. False: a handler raised, and nothing was
// begun. But an interrupt lets an update be made first: else its parameter would miss it.
bool run_signal_handlers(bool updates) {
    const of_python &p = of_interpreter;
    if (p.run_signal_handlers() == 0)
        return true;
    _object *type = nullptr, *value = nullptr, *trace = nullptr;
    p.fetch(&type, &value, &trace);
    const bool later = updates && p.matches(type, *p.interrupt) != 0;
    p.restore(type, value, trace);
    if (!later)
        return false;
    p.clear();
    interrupted = 1;
    return true;
}

// The updates that Python makes on this thread; one may need that of another plan.
struct Updating : Pinned {
    explicit Updating(const Plan *of) : plan(of), outer(innermost) { innermost = this; }
    ~Updating() { innermost = outer; }

    const Plan *const plan; // nullptr: not an update
    const Updating *const outer;
    static thread_local const Updating *innermost;
};

thread_local const Updating *Updating::innermost = nullptr;

} // namespace

bool is_updating_here(const Plan *plan) {
    const Updating *at = Updating::innermost;
    while (at != nullptr && at->plan != plan)
        at = at->outer;
    return at != nullptr;
}

bool in_python(const std::function<void()> &work, const Plan *updates, bool is_users) {
    raised_in_python = nullptr;
    const Gil gil;
    const HeldInterrupts held;
    const Updating now(updates);
    if (!run_signal_handlers(updates != nullptr)) {
        take_exception(true);
        return false;
    }
    bool raised = false;
    const bool done = answers([&] {
        try {
            work();
        } catch (const RaisedInPython &) {
            raised = true;
        }
    });
    if (raised)
        take_exception(updates != nullptr || is_users);
    return done && !raised;
}

Caller find_caller() {
    if (PythonError::type == nullptr) // no Python here
        return {};
    const of_python &p = of_interpreter;
    const Gil gil;
    _object *found = p.call_method(PythonError::type, "_find_caller", nullptr);
    Caller caller;
    if (found != nullptr) {
        caller = {utf8_of(p.tuple_item(found, 0)), utf8_of(p.tuple_item(found, 1))};
        p.drop(found);
    }
    p.clear();
    return caller;
}

} // namespace optfuse
