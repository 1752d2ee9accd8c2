// SPDX-License-Identifier: BSD-3-Clause
// waiting.h: backward mode, on the CPU: complete gradients whose updates have not been
// created. Until they are, everything is as before step() in stock: nothing is marked.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

namespace optfuse {

class Waiting {
  public:
    struct One {
        size_t slot;
        at::Tensor param; // so that it lives as long
    };
    // Those of a pass that go together, and room to work with them.
    struct Batch {
        std::vector<One> all;
        std::vector<size_t> slots;
        std::vector<size_t> which;
    };
    // task: the graph task of autograd in which the gradient was complete. Returns whether
    // those of the task have `enough` bytes now. A second gradient, which another pass has
    // added, leaves both to step().
    bool add(One one, size_t bytes, int task, size_t enough);
    Batch take(int task);
    void reuse(Batch &&batch); // its memory, for later ones
    void forget();             // they are left to step()
    // Around fork(): nobody is in the middle of anything above.
    static void hold_all();
    static void let_all_go();

  private:
    struct Pass {
        int task;
        size_t bytes;
        Batch batch;
    };
    Pass &pass_of(int task);
    std::vector<Pass> passes; // that are under way; few
    Batch spare;
    std::vector<int> task_of; // of each slot; NONE: it doesn't wait
};

} // namespace optfuse
