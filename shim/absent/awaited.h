// SPDX-License-Identifier: BSD-3-Clause
// awaited.h: gradients whose values are still on their way. DistributedDataParallel reduces them
// between processes, in buckets. Whoever looks at such a gradient comes here first, by the mark on
// its tensor; an update that was created meanwhile waits just before it is launched
// (of_inputs.awaits).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <vector>

#include "optfuse.h"

namespace optfuse {

using Reduction = c10::intrusive_ptr<c10::ivalue::Future>;

// A bucket: the gradients of `params` one after the other, in elements from offsets[i] on, which
// are what they should be when the reduction has completed without an error.
struct Bucket {
    const std::vector<at::Tensor> &params;
    const at::Tensor &buffer;
    const std::vector<int64_t> &offsets;
    Reduction reduction;
    int64_t group; // of the model; at least 0
};

// From here on each .grad stands for the reduced values: the part of the bucket that it is, or a
// tensor into which its part is copied then, as DDP does at the end of backward. Returns which of
// them can't wait, since others may know the gradient's memory: nothing was done to them.
std::vector<int64_t> expect(const Bucket &bucket);

// Whether the values of the gradient with this memory are on their way.
bool is_on_its_way(const c10::StorageImpl *memory);
// How many gradients are.
extern std::atomic<size_t> n_on_their_way;
inline bool is_any_on_its_way() {
    return n_on_their_way.load(std::memory_order_acquire) != 0;
}
// Waits for them. False after of_set_error(): the reduction has failed. No lock of a plan held.
bool await_arrival(const c10::StorageImpl *memory);
// For all of a model, or of the process.
constexpr int64_t ALL_GROUPS = -1;
bool await_arrivals(int64_t group);

extern const of_await_host await_host;

} // namespace optfuse
