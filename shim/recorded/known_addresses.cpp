// SPDX-License-Identifier: BSD-3-Clause
// known_addresses.cpp: storages whose addresses somebody outside of PyTorch may have, such as NumPy.
#include <algorithm>
#include <atomic>
#include <mutex>

#include "guard.h"
#include "recorded/tape.h"

namespace optfuse::recorded {
namespace {

struct Shown {
    std::mutex guards_all;
    ska::flat_hash_set<const c10::StorageImpl *> storages;
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> kept; // no address comes twice
    size_t prune_at = 64;
    std::atomic<bool> has_any{false};
};

Shown &all() {
    static auto *const shown = new Shown; // leaked: threads may outlive destructors
    return *shown;
}

// With the lock.
void prune(Shown &shown) {
    const auto is_gone = [&](const c10::weak_intrusive_ptr<c10::StorageImpl> &storage) {
        if (!storage.expired())
            return false;
        shown.storages.erase(storage._unsafe_get_target());
        return true;
    };
    shown.kept.erase(std::remove_if(shown.kept.begin(), shown.kept.end(), is_gone),
                     shown.kept.end());
    shown.prune_at = 64 + 2 * shown.kept.size();
}

} // namespace

void show(c10::StorageImpl *storage) {
    Shown &shown = all();
    const std::lock_guard<std::mutex> lock(shown.guards_all);
    if (!OF_GUARD(recorded_show) || !shown.storages.insert(storage).second)
        return;
    shown.kept.emplace_back(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
    shown.has_any.store(true, std::memory_order_release);
    if (shown.kept.size() > shown.prune_at)
        prune(shown);
}

bool is_shown(const c10::StorageImpl *storage) {
    Shown &shown = all();
    if (!shown.has_any.load(std::memory_order_acquire))
        return false;
    const std::lock_guard<std::mutex> lock(shown.guards_all);
    return shown.storages.find(storage) != shown.storages.end();
}

} // namespace optfuse::recorded
