// SPDX-License-Identifier: BSD-3-Clause
// proxies.cpp: a table beside the core's own (plugin/registry.c), whose keys are memory.
#include "memory/proxies.h"

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "memory/memory.h"

namespace optfuse {
namespace {

// Leaked: tensors may be used after destructors have run.
struct ProxyTable {
    std::mutex lock; // guards the entries
    std::unordered_multimap<const void *, const c10::StorageImpl *> entries;
    std::atomic<size_t> n{0}; // of entries; read without the lock, as lock_free.h says of a count
};

ProxyTable &proxy_table() {
    static auto *only = new ProxyTable;
    return *only;
}

} // namespace

void add_proxies(const c10::StorageImpl *key, const Proxies &proxies) {
    ProxyTable &all = proxy_table();
    const std::lock_guard<std::mutex> guard(all.lock);
    for (const void *proxy : proxies)
        all.entries.emplace(proxy, key);
    all.n.store(all.entries.size(), std::memory_order_release);
}

void remove_proxies(const c10::StorageImpl *key, const Proxies &proxies) {
    if (proxies.empty())
        return;
    ProxyTable &all = proxy_table();
    const std::lock_guard<std::mutex> guard(all.lock);
    for (const void *proxy : proxies) {
        const auto [begin, end] = all.entries.equal_range(proxy);
        for (auto entry = begin; entry != end; ++entry)
            if (entry->second == key) {
                all.entries.erase(entry);
                break;
            }
    }
    all.n.store(all.entries.size(), std::memory_order_release);
}

std::vector<const c10::StorageImpl *> keys_of_proxy(const c10::TensorImpl *tensor) {
    ProxyTable &all = proxy_table();
    std::vector<const c10::StorageImpl *> keys;
    if (all.n.load(std::memory_order_acquire) == 0)
        return keys;
    const std::lock_guard<std::mutex> guard(all.lock);
    for (const void *proxy : {static_cast<const void *>(tensor),
                              static_cast<const void *>(storage_of(tensor))}) {
        const auto [begin, end] = all.entries.equal_range(proxy);
        for (auto entry = begin; entry != end; ++entry)
            keys.push_back(entry->second);
    }
    return keys;
}

} // namespace optfuse
