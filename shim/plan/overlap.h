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

// The writes of other slots of the plan to the memory of a tensor of this slot's.
struct Overlap {
    bool before = false;       // slots before it write parameter or state there
    bool behind = false;       // slots behind it do
    bool state_behind = false; // whose updates may come before those that run by themselves
    bool gradient = false;     // a program writes a gradient there
    // The update has to read what those before it have written.
    bool is_before() const { return before || gradient; }
    bool is_any() const { return is_before() || behind; }
};
Overlap overlap_of(const Slot *slot, const c10::TensorImpl *tensor);
// Whether other slots write state there.
bool is_in_other_state(const Slot *slot, const c10::TensorImpl *tensor);
// None if nobody else knows the gradient's memory.
Overlap overlap_of_gradient(const Slot *slot, const c10::TensorImpl *gradient);
// OF_FOUND_ERROR: the update would have to come after some of these, and before others.
of_found refuse_between(const Slot *slot);
// OF_FOUND_ERROR if there are any on a GPU, where PyTorch updates all parameters at once.
of_found check_on_gpu(const Slot *slot, const Overlap &written);

} // namespace optfuse
