// SPDX-License-Identifier: BSD-3-Clause
// gil.cpp: nothing of Python is linked, so its functions are looked up in the
// process.
#include <dlfcn.h>

#include <atomic>

#include "gil.h"
#include "guard.h"

namespace optfuse {
namespace {

struct Python {
    int (*holds_gil)();
    void *(*this_thread)();
    void *(*save_thread)();
    void (*restore_thread)(void *);
};

template <typename Function> void look_up(const char *name, Function *function) {
    *function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

Python find() {
    Python python = {};
    look_up("PyGILState_Check", &python.holds_gil);
    look_up("PyGILState_GetThisThreadState", &python.this_thread);
    look_up("PyEval_SaveThread", &python.save_thread);
    look_up("PyEval_RestoreThread", &python.restore_thread);
    return python;
}

const Python &python() {
    static const Python found = find();
    return found;
}

std::atomic<bool> needed{false};

bool holds_gil() {
    const Python &p = python();
    return p.holds_gil != nullptr && p.this_thread != nullptr && p.save_thread != nullptr &&
           p.restore_thread != nullptr && p.this_thread() != nullptr && p.holds_gil() == 1;
}

} // namespace

void updates_take_the_gil() { needed.store(true, std::memory_order_relaxed); }

WithoutGil::WithoutGil() : thread(nullptr) {
    if (needed.load(std::memory_order_relaxed) && OF_GUARD(gil) && holds_gil())
        thread = python().save_thread();
}

WithoutGil::~WithoutGil() {
    if (thread != nullptr)
        python().restore_thread(thread);
}

} // namespace optfuse
