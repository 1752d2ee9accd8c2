// SPDX-License-Identifier: BSD-3-Clause
// proxies.cpp: a table beside the core's own (plugin/registry.c), whose keys are memory.
#include "tensor/proxies.h"

#include <atomic>
#include <mutex>
#include <unordered_map>

namespace optfuse {
namespace {

// Leaked: tensors may be used after destructors have run.
struct ProxyTable {
    std::mutex lock; // guards the entries
    std::unordered_map<const c10::TensorImpl *, const c10::StorageImpl *> entries;
    std::atomic<size_t> n{0}; // of them; read without the lock, as lock_free.h says of a count
};

ProxyTable &proxy_table() {
    static auto *only = new ProxyTable;
    return *only;
}

} // namespace

void add_proxies(const c10::StorageImpl *key, const Proxies &tensors) {
    ProxyTable &all = proxy_table();
    const std::lock_guard<std::mutex> guard(all.lock);
    for (const c10::TensorImpl *tensor : tensors)
        all.entries[tensor] = key;
    all.n.store(all.entries.size(), std::memory_order_release);
}

void remove_proxies(const c10::StorageImpl *key, const Proxies &tensors) {
    if (tensors.empty())
        return;
    ProxyTable &all = proxy_table();
    const std::lock_guard<std::mutex> guard(all.lock);
    for (const c10::TensorImpl *tensor : tensors) {
        const auto found = all.entries.find(tensor);
        if (found != all.entries.end() && found->second == key)
            all.entries.erase(found);
    }
    all.n.store(all.entries.size(), std::memory_order_release);
}

const c10::StorageImpl *key_of_proxy(const c10::TensorImpl *tensor) {
    ProxyTable &all = proxy_table();
    if (all.n.load(std::memory_order_acquire) == 0)
        return nullptr;
    const std::lock_guard<std::mutex> guard(all.lock);
    const auto found = all.entries.find(tensor);
    return found == all.entries.end() ? nullptr : found->second;
}

} // namespace optfuse
