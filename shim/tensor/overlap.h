// SPDX-License-Identifier: BSD-3-Clause
// overlap.h: memory that one parameter's update reads and another one's, in the same step(), writes:
// a gradient that is another parameter or its state, by whatever tensor. PyTorch updates the
// parameters in their order, and each sees what those before it have written.
#pragma once

#include <cstddef>

#include "optfuse.h"

namespace c10 {
struct StorageImpl;
struct TensorImpl;
} // namespace c10

namespace optfuse {

struct Slot;

// A tensor that an update writes, as it was at the beginning of a step().
struct Written {
    const c10::StorageImpl *storage;
    const c10::TensorImpl *tensor;
    size_t slot;
    enum Kind { PARAM, STATE, GRADIENT } kind;
};

// What other slots of the plan write to the memory of a tensor of this slot's.
struct Overlap {
    bool before = false;       // slots before it write parameter or state there
    bool behind = false;       // slots behind it do
    bool state = false;        // some of that is state
    bool state_behind = false; // whose updates may come before those that run by themselves
    bool gradient = false;     // a program writes a gradient there
    // What writes comes before this slot's update, or all of it by itself, in order.
    bool is_before() const { return before || gradient; }
};
Overlap overlap_of(const Slot *slot, const c10::TensorImpl *tensor);
// None if nobody else knows the gradient's memory.
Overlap overlap_of_gradient(const Slot *slot, const c10::TensorImpl *gradient);
// Of an update that would have to come after some of these, and before others. OF_FOUND_ERROR.
of_found refuse_between(const Slot *slot);

} // namespace optfuse
