// SPDX-License-Identifier: BSD-3-Clause
// waiting.cpp: which gradients wait, by backward pass. A pass takes its own only: what
// another thread's pass has made is not complete for this one.
#include "waiting.h"

#include <algorithm>
#include <mutex>
#include <utility>

namespace optfuse {
namespace {

constexpr int NONE = -1;
std::mutex waiting_lock; // of all plans, for fork(); a leaf: no tensor dies under it

} // namespace

Waiting::Pass &Waiting::pass_of(int task) {
    for (Pass &pass : passes)
        if (pass.task == task)
            return pass;
    passes.push_back({task, 0, std::move(spare)});
    return passes.back();
}

bool Waiting::add(One one, size_t bytes, int task, size_t enough) {
    const std::lock_guard<std::mutex> guard(waiting_lock);
    const size_t slot = one.slot;
    if (slot >= task_of.size())
        task_of.resize(slot + 1, NONE);
    if (task_of[slot] != NONE) {
        std::vector<One> &all = pass_of(task_of[slot]).batch.all;
        const auto is_first = [slot](const One &other) { return other.slot == slot; };
        const auto first = std::find_if(all.begin(), all.end(), is_first);
        if (first != all.end()) // `one` keeps the parameter alive
            all.erase(first);
        task_of[slot] = NONE;
        return false;
    }
    Pass &pass = pass_of(task);
    pass.batch.all.push_back(std::move(one));
    pass.bytes += bytes;
    task_of[slot] = task;
    return pass.bytes >= enough;
}

Waiting::Batch Waiting::take(int task) {
    const std::lock_guard<std::mutex> guard(waiting_lock);
    const auto found = std::find_if(passes.begin(), passes.end(),
                                    [task](const Pass &pass) { return pass.task == task; });
    if (found == passes.end())
        return {};
    Batch batch = std::move(found->batch);
    passes.erase(found);
    for (const One &one : batch.all)
        task_of[one.slot] = NONE;
    return batch;
}

void Waiting::reuse(Batch &&batch) {
    batch.all.clear(); // without the lock: parameters may die here
    batch.slots.clear();
    const std::lock_guard<std::mutex> guard(waiting_lock);
    if (spare.all.capacity() == 0)
        spare = std::move(batch);
}

void Waiting::forget() {
    std::vector<Pass> gone;
    const std::lock_guard<std::mutex> guard(waiting_lock);
    gone.swap(passes);
    task_of.clear();
}

void Waiting::hold_all() { waiting_lock.lock(); }
void Waiting::let_all_go() { waiting_lock.unlock(); }

} // namespace optfuse
