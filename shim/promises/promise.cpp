// SPDX-License-Identifier: BSD-3-Clause
// promise.cpp: see promise.h.
#include "promises/promise.h"

#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/compat.h"
#include "base/error.h"
#include "clipping/late_norm.h"
#include "fence.h"
#include "guard.h"
#include "memory/memory.h"
#include "promises/layer.h"
#include "promises/product.h"
#include "promises/trials.h"

namespace optfuse {
namespace {

// Stands in the place of a promise's memory.
struct Promise {
    SharedProduct product;
    std::shared_ptr<PromisingLayer> layer;
    WeakStorage storage;
};

struct LivingPromises {
    std::mutex lock; // guards the set, and which storages are promises
    std::unordered_set<Promise *> living;
};

LivingPromises &promises() {
    static auto *all = new LivingPromises; // leaked: tensors may outlive destructors
    return *all;
}

// With the lock.
Promise *promise_of(const c10::StorageImpl *storage) {
    const c10::DataPtr &data = data_ptr_of(storage);
    return data.get_deleter() == free_promise ? static_cast<Promise *>(data.get_context())
                                              : nullptr;
}

// The product of an update that is being launched, and whose it is.
struct Launched {
    SharedProduct product;
    std::shared_ptr<PromisingLayer> layer;
    std::unique_ptr<PartedNorm> norm; // null: nobody waits for it
};

Launched launched_of(const c10::StorageImpl *storage) {
    const std::lock_guard<std::mutex> guard(promises().lock);
    const Promise *promise = promise_of(storage);
    return promise == nullptr ? Launched() : Launched{promise->product, promise->layer, nullptr};
}

// a + b, and whose gradients these are; null: one of them has been computed, or they have to be.
struct Sum {
    SharedProduct product;
    Launched left, right;
};

Sum sum_of(const c10::StorageImpl *a, const c10::StorageImpl *b) {
    Launched left = launched_of(a), right = launched_of(b);
    SharedProduct sum =
        left.product && right.product ? sum_of_products(left.product, right.product) : nullptr;
    if (!sum || !left.layer->takes(*sum))
        return {};
    return {std::move(sum), std::move(left), std::move(right)};
}

enum class Given { DONE, COMPUTED_ALREADY, CHANGED };

// From here on the storage has this memory, with the product's numbers. Another thread may have
// come first; and one that comes now takes the memory for granted as soon as the storage is no
// promise any more, so the seal goes before, and behind the numbers.
Given give_memory(c10::StorageImpl *storage, const SharedProduct &product, c10::DataPtr &&memory) {
    c10::DataPtr before; // dies unlocked
    const std::lock_guard<std::mutex> guard(promises().lock);
    const Promise *promise = promise_of(storage);
    if (promise == nullptr)
        return Given::COMPUTED_ALREADY;
    if (promise->product != product)
        return Given::CHANGED;
    of_order_marks();
    if (!of_is_pending(storage)) // else the update's launch takes the seal off
        unseal(storage);
    before = storage->set_data_ptr(std::move(memory));
    of_order_marks();
    return Given::DONE;
}

// Throws, and it is a promise still.
void compute(c10::StorageImpl *storage) {
    Given given = Given::CHANGED;
    while (given == Given::CHANGED) {
        const Launched kept = launched_of(storage);
        if (!kept.product)
            return;
        c10::DataPtr memory = c10::GetAllocator(c10::kCPU)->allocate(kept.product->nbytes());
        kept.product->compute_all(memory.get());
        note_computed(kept.product.get(), memory.get());
        given = give_memory(storage, kept.product, std::move(memory));
        if (given == Given::DONE)
            kept.layer->note_made();
    }
}

const void *begin(const void *key, const void **grad) {
    auto *storage = static_cast<const c10::StorageImpl *>(key);
    Launched found = launched_of(storage);
    if (found.product && is_norm_waiting(found.product.get()))
        found.norm = std::make_unique<PartedNorm>(found.product.get());
    if (found.product)
        return new Launched(std::move(found));
    *grad = data_ptr_of(storage).get();
    return nullptr;
}

const void *rows(const void *product, int64_t first, int64_t end) {
    const auto *launched = static_cast<const Launched *>(product);
    const void *panel = launched->product->panel(first, end);
    const int64_t columns = launched->product->columns();
    if (launched->norm)
        launched->norm->add(panel, first * columns, (end - first) * columns);
    if (panel == nullptr)
        of_set_error("%s: %s", launched->layer->label().c_str(),
                     std::string(of_error_message()).c_str());
    return panel;
}

void end(const void *product) {
    const auto *launched = static_cast<const Launched *>(product);
    launched->layer->note_panels();
    delete launched;
}

} // namespace

void free_promise(void *opaque) {
    LivingPromises &all = promises();
    {
        const std::lock_guard<std::mutex> guard(all.lock);
        all.living.erase(static_cast<Promise *>(opaque));
    }
    delete static_cast<Promise *>(opaque);
}

// Has the update compute it panel by panel.
bool update_by_panels(const c10::StorageImpl *storage, of_inputs *in) {
    const Launched found = launched_of(storage);
    if (!found.product)
        return false;
    in->product = storage;
    in->rows = found.product->rows();
    in->panel_rows = found.product->panel_rows();
    return true;
}

// Where it fails, as where there is no memory, it is a promise still.
bool keep_promise(c10::StorageImpl *storage) {
    const Launched found = launched_of(storage);
    if (!found.product || answers([&] { compute(storage); }))
        return true;
    of_set_error("the gradient of %s, which backward() has promised, could not be computed: %s\n"
                 "Nothing was changed. With optfuse.fuse(optimizer, products=\"off\") backward() "
                 "computes it",
                 found.layer->label().c_str(), std::string(of_error_message()).c_str());
    return false;
}

const of_product_host product_host = {sizeof(of_product_host), begin, rows, end};

bool is_promise(const c10::TensorImpl *impl) {
    return impl->has_storage() &&
           data_ptr_of(storage_of(impl)).get_deleter() == free_promise;
}

at::Tensor make_promise(SharedProduct product, std::shared_ptr<PromisingLayer> layer) {
    const at::ScalarType dtype = product->dtype();
    const int64_t sizes[] = {product->rows(), product->columns()};
    auto *promise = new Promise{std::move(product), std::move(layer), weak(nullptr)};
    at::Tensor made = make_absent(sizes, {}, dtype, c10::kCPU, promise, free_promise);
    promise->storage = weak(storage_of(made.unsafeGetTensorImpl()));
    LivingPromises &all = promises();
    const std::lock_guard<std::mutex> guard(all.lock);
    all.living.insert(promise);
    return made;
}

bool is_as_promised(const c10::TensorImpl *impl) {
    if (!is_promise(impl))
        return false;
    const Launched found = launched_of(storage_of(impl));
    return found.product && impl->storage_offset() == 0 && impl->is_contiguous() &&
           impl->dim() == 2 && impl->sizes()[0] == found.product->rows() &&
           impl->sizes()[1] == found.product->columns();
}

std::shared_ptr<const Computable> numbers_of_promise(const c10::TensorImpl *impl) {
    SharedProduct found = is_as_promised(impl) ? launched_of(storage_of(impl)).product : nullptr;
    const bool is_usual = found && found->dtype() == at::kFloat && found->has_denormals();
    return is_usual ? found : nullptr;
}

at::Tensor cast_promise(const c10::StorageImpl *storage, at::ScalarType dtype) {
    Launched found = launched_of(storage);
    return found.product ? make_promise(cast_product(std::move(found.product), dtype), found.layer)
                         : at::Tensor();
}

at::Tensor sum_of_promises(const c10::StorageImpl *a, const c10::StorageImpl *b) {
    const Sum sum = sum_of(a, b);
    if (!sum.product)
        return {};
    if (a != b) // a hook may add one to itself
        sum.right.layer->note_added();
    return make_promise(sum.product, sum.left.layer);
}

bool add_promise(c10::StorageImpl *to, const c10::StorageImpl *other) {
    const Sum sum = sum_of(to, other);
    {
        const std::lock_guard<std::mutex> guard(promises().lock);
        Promise *promise = sum.product ? promise_of(to) : nullptr;
        if (promise == nullptr || promise->product != sum.left.product)
            return false;
        promise->product = sum.product;
    }
    if (to != other)
        sum.right.layer->note_added();
    return true;
}

void keep_all_promises() {
    std::vector<c10::intrusive_ptr<c10::StorageImpl>> held;
    {
        LivingPromises &all = promises();
        const std::lock_guard<std::mutex> guard(all.lock);
        for (const Promise *promise : all.living)
            if (auto storage = promise->storage.lock())
                held.push_back(std::move(storage));
    }
    for (const auto &storage : held)
        keep_promise(storage.get());
    make_all_norms();
}

void lock_promises() {
    layers_lock().lock();
    trials_lock().lock();
    promises().lock.lock();
    norms_lock().lock();
}

void unlock_promises() {
    norms_lock().unlock();
    promises().lock.unlock();
    trials_lock().unlock();
    layers_lock().unlock();
}

} // namespace optfuse
