// SPDX-License-Identifier: BSD-3-Clause
// awaited.cpp: a table of what is on its way, by the memory of the gradient. It is no part of a
// plan: gradients of several optimizers come in one bucket, and a gradient is looked at without
// any optimizer.
#include "absent/awaited.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "absent/kinds.h"
#include "base/compat.h"
#include "base/parallel.h"
#include "fence.h"
#include "memory/memory.h"
#include "python/gil.h"

namespace optfuse {

std::atomic<size_t> n_on_their_way{0}; // read without the lock, as lock_free.h says of a count

namespace {

struct Arrival {
    Reduction reduction; // constant, like all up to the lock but the bucket
    at::Tensor bucket;   // the network still uses its memory
    // The gradient's memory. Held weakly, as by a scaling: zero_grad() frees it. While there is an
    // entry no other storage can have its address.
    WeakStorage gradient;
    const char *from = nullptr; // what is to be copied; nullptr: the gradient is the bucket's part
    char *to = nullptr;
    int64_t bytes = 0;
    int64_t group = 0;
    std::mutex lock; // of the two below, and the bucket; held while one thread waits and copies
    bool has_come = false;
    std::string failure; // "": none

    explicit Arrival(c10::StorageImpl *memory) : gradient(weak(memory)) {}
};

using Shared = std::shared_ptr<Arrival>;

// Leaked: tensors may be used after destructors have run.
struct Table {
    std::mutex lock; // guards the rest
    std::unordered_map<const c10::StorageImpl *, Shared> entries;
    std::vector<Shared> done; // to be dropped where no lock of a plan is held: it may need the GIL
};

Table &table() {
    static auto *only = new Table;
    return *only;
}

Shared find(const c10::StorageImpl *memory) {
    if (!is_any_on_its_way())
        return nullptr;
    Table &all = table();
    const std::lock_guard<std::mutex> guard(all.lock);
    const auto found = all.entries.find(memory);
    return found == all.entries.end() ? nullptr : found->second;
}

void enter(const c10::StorageImpl *memory, Shared arrival) {
    Table &all = table();
    const std::lock_guard<std::mutex> guard(all.lock);
    std::swap(all.entries[memory], arrival);
    if (arrival)
        all.done.push_back(std::move(arrival));
    n_on_their_way.store(all.entries.size(), std::memory_order_release);
}

void leave(const c10::StorageImpl *memory, const Arrival *arrival) {
    Table &all = table();
    const std::lock_guard<std::mutex> guard(all.lock);
    const auto found = all.entries.find(memory);
    if (found == all.entries.end() || found->second.get() != arrival)
        return;
    all.done.push_back(std::move(found->second));
    all.entries.erase(found);
    n_on_their_way.store(all.entries.size(), std::memory_order_release);
}

// Drops what is done, and what is on its way no more to gradients that nobody has any more.
void sweep() {
    Table &all = table();
    std::vector<Shared> dying; // after the lock is free: that may need the GIL
    const std::lock_guard<std::mutex> guard(all.lock);
    for (auto at = all.entries.begin(); at != all.entries.end();) {
        const bool is_over = at->second->gradient.expired() && at->second->reduction->completed();
        if (is_over)
            dying.push_back(std::move(at->second));
        at = is_over ? all.entries.erase(at) : std::next(at);
    }
    n_on_their_way.store(all.entries.size(), std::memory_order_release);
    for (Shared &done : all.done)
        dying.push_back(std::move(done));
    all.done.clear();
}

constexpr int64_t kCopiedAtATime = int64_t{1} << 18; // bytes; fewer are one thread's work

void copy(const Arrival *arrival) {
    in_parallel(arrival->bytes, kCopiedAtATime, [&](int64_t begin, int64_t end) {
        std::memcpy(arrival->to + begin, arrival->from + begin, static_cast<size_t>(end - begin));
    });
}

void note_failure(Arrival *arrival) {
    arrival->failure = arrival->reduction->tryRetrieveErrorMessage();
    if (arrival->failure.empty())
        arrival->failure = "it does not say why";
    arrival->bucket.reset(); // else the entry would keep itself alive, and every flush() raise
}

void arrive(Arrival *arrival) {
    const auto storage = arrival->gradient.lock();
    if (storage && arrival->from != nullptr) {
        copy(arrival);
        if (!of_is_pending(storage.get())) { // else the update's launch takes the seal off
            of_order_marks();
            unseal(storage.get());
        }
    }
    of_order_marks();
    arrival->has_come = true;
}

// Waits, if it has to. The GIL is not held: others may need it to complete the reduction.
bool take(const c10::StorageImpl *memory, Arrival *arrival) {
    const std::lock_guard<std::mutex> guard(arrival->lock);
    if (arrival->has_come)
        return true;
    if (arrival->failure.empty()) {
        arrival->reduction->wait();
        if (arrival->reduction->hasError())
            note_failure(arrival);
        else
            arrive(arrival);
    }
    if (arrival->has_come)
        leave(memory, arrival);
    else
        of_set_error("the reduction of gradients between processes has failed, so parameters of "
                     "this process are not what they should be: %.600s. Load them from a "
                     "checkpoint",
                     arrival->failure.c_str());
    return arrival->has_come;
}

bool has_arrived(const void *key) {
    const auto *memory = static_cast<const c10::StorageImpl *>(key);
    const Shared found = find(memory);
    if (!found)
        return true;
    {
        const std::unique_lock<std::mutex> other_waits(found->lock, std::try_to_lock);
        if (!other_waits.owns_lock() || !found->failure.empty())
            return false;
        if (!found->has_come && !found->reduction->completed())
            return false;
    }
    return take(memory, found.get());
}

bool await(const void *key) {
    return await_arrival(static_cast<const c10::StorageImpl *>(key));
}

// Whether the kernels' plain copy will do, and nobody knows the memory but .grad itself.
bool can_wait(const at::Tensor &param, const at::Tensor &buffer) {
    const at::Tensor &grad = param.grad();
    if (!grad.defined() || grad.layout() != at::kStrided || grad.requires_grad())
        return false;
    const c10::TensorImpl *g = grad.unsafeGetTensorImpl();
    return g->has_storage() && !g->key_set().has(c10::DispatchKey::Python) && !grad.is_neg() &&
           !grad.is_conj() && grad.device().is_cpu() &&
           grad.scalar_type() == buffer.scalar_type() && grad.sizes() == param.sizes() &&
           grad.strides() == param.strides() && grad.is_non_overlapping_and_dense() &&
           grad.numel() != 0 && is_private(storage_of(g), 0) && make_memory(storage_of(g));
}

Shared arrival_of(const Bucket &bucket, c10::StorageImpl *memory) {
    auto arrival = std::make_shared<Arrival>(memory);
    arrival->reduction = bucket.reduction;
    arrival->bucket = bucket.buffer;
    arrival->group = bucket.group;
    return arrival;
}

bool is_part(const at::Tensor &grad, const at::Tensor &buffer) {
    return grad.defined() && grad.unsafeGetTensorImpl()->has_storage() &&
           storage_of(grad.unsafeGetTensorImpl()) == storage_of(buffer.unsafeGetTensorImpl());
}

// With gradient_as_bucket_view=True. DDP has the buffer and two tensors for each part, of which
// .grad is one; a further one may be anybody's, who would read the memory past the marks.
bool expect_parts(const Bucket &bucket) {
    c10::StorageImpl *memory = storage_of(bucket.buffer.unsafeGetTensorImpl());
    const size_t known = 1 + 2 * bucket.params.size();
    const size_t users = c10::raw::intrusive_ptr::use_count(memory) - idle_references(*memory);
    if (users != known || !bucket.buffer.device().is_cpu())
        return false;
    enter(memory, arrival_of(bucket, memory));
    for (const at::Tensor &param : bucket.params)
        mark(param.grad().unsafeGetTensorImpl());
    return true;
}

void expect_copy(const Bucket &bucket, size_t i) {
    c10::TensorImpl *g = bucket.params[i].grad().unsafeGetTensorImpl();
    c10::StorageImpl *memory = storage_of(g);
    const auto size = static_cast<int64_t>(g->dtype().itemsize());
    Shared arrival = arrival_of(bucket, memory);
    const auto *values = static_cast<const char *>(data_of(bucket.buffer.unsafeGetTensorImpl()));
    arrival->from = values + bucket.offsets[i] * size;
    arrival->to = static_cast<char *>(data_of(g));
    arrival->bytes = g->numel() * size;
    enter(memory, std::move(arrival));
    mark(g);
    seal(memory);
    g->bump_version(); // DDP would write to it now
}

std::vector<Shared> all_of(int64_t group) {
    std::vector<Shared> found;
    Table &all = table();
    const std::lock_guard<std::mutex> guard(all.lock);
    for (const auto &[memory, arrival] : all.entries)
        if (group == ALL_GROUPS || arrival->group == group)
            found.push_back(arrival);
    return found;
}

} // namespace

const of_await_host await_host = {sizeof(of_await_host), has_arrived, await};
const Absent absent::awaited = {
    nullptr, nullptr, [](c10::StorageImpl *storage) { return await_arrival(storage); }};

std::vector<int64_t> expect(const Bucket &bucket) {
    updates_take_the_gil(); // to complete a reduction may need it
    sweep();
    std::vector<int64_t> left;
    const auto is_view = [&](const at::Tensor &p) { return is_part(p.grad(), bucket.buffer); };
    const bool views = std::all_of(bucket.params.begin(), bucket.params.end(), is_view);
    if (views && expect_parts(bucket))
        return left;
    for (size_t i = 0; i < bucket.params.size(); i++) {
        if (!views && can_wait(bucket.params[i], bucket.buffer))
            expect_copy(bucket, i);
        else
            left.push_back(static_cast<int64_t>(i));
    }
    return left;
}

bool is_on_its_way(const c10::StorageImpl *memory) {
    return find(memory) != nullptr;
}

bool await_arrival(const c10::StorageImpl *memory) {
    const Shared found = find(memory);
    if (!found)
        return true;
    const WithoutGil wait;
    return take(memory, found.get());
}

bool await_arrivals(int64_t group) {
    if (!is_any_on_its_way())
        return true;
    const std::vector<Shared> expected = all_of(group);
    const WithoutGil wait;
    bool all = true;
    for (const Shared &arrival : expected)
        all = take(arrival->gradient._unsafe_get_target(), arrival.get()) && all;
    return all;
}

} // namespace optfuse
