// SPDX-License-Identifier: BSD-3-Clause
// threads.h: a thread's number of threads, by which PyTorch's products of matrices round on it. A
// new thread has OpenMP's, until the first operator that shares out work sets that of
// torch.set_num_threads(). With ours it must be set where stock's operators would set it: no
// later, no earlier.
#pragma once

#include <cstdint>
#include <functional>

#include "base/pinned.h"

namespace optfuse {

// Tensors of so many elements PyTorch's elementwise operators share out (GRAIN_SIZE).
constexpr int64_t kSharedOut = 1 << 15;

// Sums of squares over vectors it shares out from so many on.
constexpr int64_t kSquaresSharedOut = (1 << 14) + 1;

// Where ours stands in the place of such an operator, on the thread on which stock would call it.
// from: the least number of elements that the operator shares out.
void set_threads_as_operators(int64_t numel, int64_t from = kSharedOut);

// Where ours calls operators earlier than stock, inside of backward, or on another thread: the
// number of this one is as before when this dies, and set_threads_as_operators() or
// set_owed_threads() sets it.
class KeepThreads : Pinned {
  public:
    KeepThreads();
    ~KeepThreads();

  private:
    const int before;
};
void set_owed_threads();
// Whether an operator could change the number of this thread.
bool would_set_threads();

// Where ours calls operators that stock does not call: work() runs on a thread of its own with as
// many threads as this one. Throws what work() throws.
void on_another_thread(const std::function<void()> &work);

} // namespace optfuse
