// SPDX-License-Identifier: BSD-3-Clause
// waiting.cpp: which gradients wait, by backward pass. A pass takes its own only: what
// another thread's pass has made is not complete for this one.
#include "autograd/waiting.h"

#include <algorithm>
#include <mutex>
#include <utility>

namespace optfuse {
namespace {

constexpr int NONE = -1;
std::mutex waiting_lock; // of all plans, for fork(); a leaf: no tensor dies under it

} // namespace

Waiting::Pass *Waiting::find(int task) {
    for (Pass &pass : passes)
        if (pass.task == task)
            return &pass;
    return nullptr;
}

Waiting::Kind Waiting::kind_of_another(int task) {
    const std::lock_guard<std::mutex> guard(waiting_lock);
    const Pass *pass = find(task);
    if (pass == nullptr)
        return NOT_BEGUN;
    latest.store(static_cast<uint64_t>(task) << 2 | pass->kind, std::memory_order_relaxed);
    return pass->kind;
}

bool Waiting::begin(int task, Kind kind) {
    const std::lock_guard<std::mutex> guard(waiting_lock);
    if (find(task) != nullptr)
        return false;
    passes.push_back({task, kind, 0, {}});
    return true;
}

void Waiting::end(int task) {
    Batch left; // parameters may die with it, without the lock
    const std::lock_guard<std::mutex> guard(waiting_lock);
    Pass *pass = find(task);
    if (pass == nullptr)
        return;
    left = take_from(pass);
    passes.erase(passes.begin() + (pass - passes.data()));
}

bool Waiting::add(One one, size_t bytes, int task, size_t enough) {
    const std::lock_guard<std::mutex> guard(waiting_lock);
    const size_t slot = one.slot;
    Pass *pass = find(task);
    if (slot >= task_of.size())
        task_of.resize(slot + 1, NONE);
    if (task_of[slot] != NONE) {
        Pass *other = find(task_of[slot]);
        task_of[slot] = NONE;
        std::vector<One> &all = other->batch.all;
        const auto is_first = [slot](const One &waits) { return waits.slot == slot; };
        // `one` keeps the parameter alive.
        all.erase(std::find_if(all.begin(), all.end(), is_first));
        return false;
    }
    if (pass->batch.all.capacity() == 0)
        pass->batch = std::move(spare);
    pass->batch.all.push_back(std::move(one));
    pass->bytes += bytes;
    task_of[slot] = task;
    return pass->bytes >= enough;
}

Waiting::Batch Waiting::take_from(Pass *pass) {
    Batch batch = std::move(pass->batch);
    pass->batch = {};
    pass->bytes = 0;
    for (const One &one : batch.all)
        task_of[one.slot] = NONE;
    return batch;
}

Waiting::Batch Waiting::take(int task) {
    const std::lock_guard<std::mutex> guard(waiting_lock);
    Pass *pass = find(task);
    return pass == nullptr ? Batch() : take_from(pass);
}

void Waiting::reuse(Batch &&batch) {
    batch.all.clear(); // without the lock: parameters may die here
    batch.slots.clear();
    const std::lock_guard<std::mutex> guard(waiting_lock);
    if (spare.all.capacity() == 0)
        spare = std::move(batch);
}

void Waiting::forget() {
    std::vector<Batch> gone;
    const std::lock_guard<std::mutex> guard(waiting_lock);
    for (Pass &pass : passes)
        gone.push_back(take_from(&pass));
    task_of.clear();
}

void Waiting::hold_all() { waiting_lock.lock(); }
void Waiting::let_all_go() { waiting_lock.unlock(); }

} // namespace optfuse
