// SPDX-License-Identifier: BSD-3-Clause
// waiting.h: backward mode: the passes under way, of several threads perhaps; and, on the
// CPU, their complete gradients whose updates have not been created. Until they are,
// everything is as before step() in stock: nothing is marked.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
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
    // What a pass does to the gradients. task: of autograd's graph, one for each pass, and
    // never used again.
    enum Kind { NOT_BEGUN, ADDS, UPDATES };
    Kind kind_of(int task) {
        const uint64_t last = latest.load(std::memory_order_relaxed);
        return last >> 2 == static_cast<uint64_t>(task) ? static_cast<Kind>(last & 3)
                                                        : kind_of_another(task);
    }
    // False: another device's thread has begun it meanwhile.
    bool begin(int task, Kind kind);
    void end(int task); // what waits is left to step()
    // task: the one in which the gradient was complete. Returns whether
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
        Kind kind;
        size_t bytes;
        Batch batch;
    };
    Kind kind_of_another(int task);
    Pass *find(int task);
    Batch take_from(Pass *pass);
    std::atomic<uint64_t> latest{0}; // task * 4 + kind of the pass that was asked for last
    std::vector<Pass> passes;        // that are under way; few
    Batch spare;
    std::vector<int> task_of; // of each slot; NONE: it doesn't wait
};

} // namespace optfuse
