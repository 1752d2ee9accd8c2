// SPDX-License-Identifier: BSD-3-Clause
// owner.h: who owns an optimizer, Python (loader/reader.h) or a C++ program (cxx/), and what
// its plan asks of it.
#pragma once

#include <cstddef>

namespace optfuse {

struct Plan;

// None of them throws. Those that return a bool return false after of_set_error().
struct Owner {
    // The first gradient of a backward pass is complete. only_adds: the count of passes says that
    // this one updates nothing.
    virtual bool begin_backward(Plan *plan, bool only_adds) = 0;
    // Optimizer state of this slot must be made now.
    virtual bool make_state(Plan *plan, size_t slot) = 0;
    // A pass is about to end: waits for the gradients that are still being reduced between
    // processes, and says so of each slot. Only where Plan::reduces.
    virtual bool await_reduction(Plan *) { return true; }
    // Rules without kernels: runs the optimizer's own step() on this slot's parameter, whose gradient
    // is in .grad. This thread has the plan's lock meanwhile: what needs it refuses to run here for
    // this plan.
    virtual bool update(Plan *, size_t /* slot */) { return true; }
    // Final mode: the gradient of this slot is complete; makes its update.
    virtual bool update_final(Plan *, size_t /* slot */) { return true; }
    // A pass has ended, and all of its updates are made; final mode: unless it only adds.
    virtual bool end_backward(Plan *) { return true; }
    // The plan is given up, and asks no more.
    virtual void close() {}

  protected:
    ~Owner() = default;
};

} // namespace optfuse
