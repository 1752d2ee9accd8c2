// SPDX-License-Identifier: BSD-3-Clause
// gil.cpp: gives Python's global lock up for a while.
#include "python/gil.h"

#include <atomic>

#include "guard.h"
#include "python/interpreter.h"

namespace optfuse {
namespace {

std::atomic<bool> needed{false};

bool holds_gil() {
    return of_python_find() && of_interpreter.this_thread() != nullptr &&
           of_interpreter.holds_gil() == 1;
}

} // namespace

void updates_take_the_gil() { needed.store(true, std::memory_order_relaxed); }

WithoutGil::WithoutGil() : thread(nullptr) {
    if (needed.load(std::memory_order_relaxed) && OF_GUARD(gil) && holds_gil())
        thread = of_interpreter.save_thread();
}

WithoutGil::~WithoutGil() {
    if (thread != nullptr)
        of_interpreter.restore_thread(thread);
}

void let_go(std::vector<at::Tensor> tensors) {
    if (!of_python_find())
        return;
    const int state = of_interpreter.take_gil();
    tensors.clear();
    of_interpreter.give_gil(state);
}

} // namespace optfuse
