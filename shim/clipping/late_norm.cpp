// SPDX-License-Identifier: BSD-3-Clause
// late_norm.cpp: see late_norm.h. The bound covers how PyTorch rounds (most_rounded_up()): a sum of
// positive numbers is that of what each of them becomes.
#include "clipping/late_norm.h"

#include <ATen/ops/scalar_tensor.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "base/threads.h"
#include "clipping/pending.h"
#include "floating.h"
#include "guard.h"
#include "memory/memory.h"

namespace optfuse {
namespace {

using Numbers = std::shared_ptr<const Computable>;

constexpr double kMostNorm = 1.8e19; // squares of larger ones are infinite in float32

// The norm of one gradient.
struct Part {
    Numbers numbers;                      // that it waits for; null: the norm is known
    WeakStorage gradient = weak(nullptr); // whose memory will have them
    float norm = 0;
};

// Stands in the place of a norm's memory. The lock guards all but `most`.
struct LateNorm {
    std::vector<Part> parts;
    float most = 0;
    WeakStorage storage = weak(nullptr);
};

struct LivingNorms {
    std::mutex lock; // guards the set, and which storages are late norms
    std::unordered_set<LateNorm *> living;
};

LivingNorms &norms_alive() {
    static auto *all = new LivingNorms; // leaked: tensors may outlive destructors
    return *all;
}

void free_norm(void *opaque) {
    const std::unique_ptr<LateNorm> dying(static_cast<LateNorm *>(opaque)); // dies unlocked
    const std::lock_guard<std::mutex> guard(norms_alive().lock);
    norms_alive().living.erase(dying.get());
}

LateNorm *norm_of(const c10::StorageImpl *storage) {
    const c10::DataPtr &data = data_ptr_of(storage);
    return data.get_deleter() == free_norm ? static_cast<LateNorm *>(data.get_context()) : nullptr;
}

// The most that PyTorch makes of n numbers of this norm.
double most_rounded(double norm, size_t n) {
    const double count = static_cast<double>(n);
    const double roundings = count / OF_NORM_LANES + 2 * OF_NORM_LANES + 4;
    const double squares = (norm * norm + count * 0x1p-149) * most_rounded_up(roundings);
    return std::sqrt(squares) * (1 + 2 * kRounding) + 0x1p-149;
}

// As PyTorch did when denormals were numbers.
float norm_here(const void *memory, size_t n, float *sums = nullptr) {
    const unsigned outside = of_floating_now();
    of_floating_set(0);
    of_norm one{static_cast<const float *>(memory), n, {1, 1}, 0, true, sums};
    of_norm *const all[] = {&one};
    norm_in_order()(all, 1);
    of_floating_set(outside);
    return one.norm;
}

// The first of all that wait that passes.
template <class Test> std::optional<Part> waiting(const Test &test) {
    const std::lock_guard<std::mutex> guard(norms_alive().lock);
    for (const LateNorm *norm : norms_alive().living)
        for (const Part &part : norm->parts)
            if (part.numbers && test(norm, part))
                return part;
    return std::nullopt;
}

// From here on the norm, which has all its parts, has memory. Another thread may have come first.
void give_number(c10::StorageImpl *storage) {
    c10::DataPtr memory = c10::GetAllocator(c10::kCPU)->allocate(sizeof(float));
    c10::DataPtr before; // dies unlocked
    const std::lock_guard<std::mutex> guard(norms_alive().lock);
    const LateNorm *norm = norm_of(storage);
    if (norm == nullptr)
        return;
    std::vector<float> norms;
    for (const Part &part : norm->parts)
        norms.push_back(part.norm);
    *static_cast<float *>(memory.get()) = norm_here(norms.data(), norms.size());
    of_order_marks();
    unseal(storage);
    before = storage->set_data_ptr(std::move(memory));
    of_order_marks();
}

// A norm that has all its parts waits no more.
void note_norm(const Computable *numbers, float found) {
    std::vector<Numbers> done; // die unlocked
    std::vector<c10::intrusive_ptr<c10::StorageImpl>> complete;
    {
        const std::lock_guard<std::mutex> guard(norms_alive().lock);
        for (LateNorm *norm : norms_alive().living) {
            bool waits = false;
            for (Part &part : norm->parts) {
                if (part.numbers.get() == numbers) {
                    part.norm = found;
                    done.push_back(std::move(part.numbers));
                }
                waits |= part.numbers != nullptr;
            }
            if (auto storage = waits ? nullptr : norm->storage.lock())
                complete.push_back(std::move(storage));
        }
    }
    for (const auto &storage : complete)
        give_number(storage.get());
}

// Throws.
void compute(const Part &part) {
    if (const auto gradient = part.gradient.lock(); gradient && !make_memory(gradient.get()))
        throw std::runtime_error(of_error_message());
    if (!is_norm_waiting(part.numbers.get()))
        return; // whoever makes a promise notes it here
    const size_t bytes = part.numbers->numel() * sizeof(float);
    const c10::DataPtr memory = c10::GetAllocator(c10::kCPU)->allocate(bytes);
    part.numbers->compute_all(memory.get());
    note_computed(part.numbers.get(), memory.get());
}

template <class Test> void compute_waiting(const Test &test) {
    while (const std::optional<Part> part = waiting(test))
        compute(*part);
}

bool make_norm(c10::StorageImpl *storage) {
    return answers([storage] {
        compute_waiting([storage](const LateNorm *norm, const Part &) {
            return norm->storage._unsafe_get_target() == storage;
        });
        give_number(storage);
    });
}

void say_finite(const OperatorCall &call) {
    torch::jit::drop(*call.stack, call.n());
    call.stack->emplace_back(at::scalar_tensor(true, at::kBool));
}

Run answer_norm(const char *op, c10::TensorImpl *, bool) {
    if (std::strcmp(op, "aten::isfinite") == 0)
        return say_finite;
    const bool needs_none =
        std::strcmp(op, "aten::detach") == 0 || std::strcmp(op, "optfuse::clip_with_norm") == 0;
    return needs_none ? go_on : nullptr;
}

Part part_of(const at::Tensor &gradient) {
    const c10::TensorImpl *impl = gradient.unsafeGetTensorImpl();
    const Absent *kind = impl->has_storage() ? absent_of(storage_of(impl)) : nullptr;
    if (kind == nullptr || kind->computable == nullptr)
        return {};
    return {kind->computable(impl), weak(storage_of(impl))};
}

// At most the sum of the squares of all norms.
double most_squares(const std::vector<Part> &parts) {
    double sum = 0;
    for (const Part &part : parts) {
        const Computable *of = part.numbers.get();
        const double most = of ? most_rounded(of->most_norm(), of->numel()) : part.norm;
        sum += most * most;
    }
    return OF_GUARD(norm_bound) ? sum : sum / 16;
}

} // namespace

at::Tensor late_norm(const std::vector<const at::Tensor *> &of) {
    auto late = std::make_unique<LateNorm>();
    std::vector<const at::Tensor *> others; // whose numbers are there
    for (const at::Tensor *tensor : of) {
        late->parts.push_back(part_of(*tensor));
        if (!late->parts.back().numbers)
            others.push_back(tensor);
    }
    if (others.size() == of.size() || of_floating_now() != 0)
        return {};
    for (const at::Tensor *tensor : of)
        set_threads_as_operators(tensor->numel(), kSquaresSharedOut);
    const auto known = others.empty() ? std::vector<float>() : norms(others);
    if (!known || !norms_are_torchs())
        return {};
    auto next = known->begin();
    for (Part &part : late->parts)
        if (!part.numbers)
            part.norm = *next++;
    // Norms of gradients that were dropped keep their factors no longer.
    compute_waiting([](const LateNorm *, const Part &p) { return p.numbers.use_count() == 1; });
    const double most = most_rounded(std::sqrt(most_squares(late->parts)), of.size());
    if (!(most < kMostNorm))
        return {};
    late->most = std::nextafter(static_cast<float>(most), std::numeric_limits<float>::infinity());
    LateNorm *norm = late.release();
    at::Tensor made = make_absent({}, {}, at::kFloat, c10::kCPU, norm, free_norm);
    norm->storage = weak(storage_of(made.unsafeGetTensorImpl()));
    const std::lock_guard<std::mutex> guard(norms_alive().lock);
    norms_alive().living.insert(norm);
    return made;
}

std::optional<float> most_of(const at::Tensor &norm) {
    if (!norm.defined() || !norm.has_storage())
        return std::nullopt;
    const std::lock_guard<std::mutex> guard(norms_alive().lock);
    const LateNorm *late = norm_of(storage_of(norm.unsafeGetTensorImpl()));
    return late != nullptr ? std::optional(late->most) : std::nullopt;
}

bool is_norm_waiting(const Computable *numbers) {
    return waiting([numbers](const LateNorm *, const Part &part) {
               return part.numbers.get() == numbers;
           }).has_value();
}

void note_computed(const Computable *numbers, const void *memory) {
    if (is_norm_waiting(numbers))
        note_norm(numbers, norm_here(memory, numbers->numel()));
}

void PartedNorm::add(const void *numbers, int64_t first, int64_t n) {
    for (int64_t now = next_; now != first; now = next_) {
        if (now == FAILED)
            return;
        std::this_thread::yield();
    }
    if (numbers == nullptr) {
        next_ = FAILED;
        return;
    }
    const auto all = static_cast<int64_t>(of_->numel());
    const float norm = norm_here(numbers, static_cast<size_t>(n), all > 1 ? sums_ : nullptr);
    if (first + n == all)
        note_norm(of_, norm);
    next_ = first + n;
}

void make_all_norms() {
    std::vector<c10::intrusive_ptr<c10::StorageImpl>> held;
    {
        const std::lock_guard<std::mutex> guard(norms_alive().lock);
        for (const LateNorm *norm : norms_alive().living)
            if (auto storage = norm->storage.lock())
                held.push_back(std::move(storage));
    }
    for (const auto &storage : held)
        make_norm(storage.get());
}

std::mutex &norms_lock() { return norms_alive().lock; }

const Absent absent::late_norm = {free_norm, answer_norm, make_norm};

} // namespace optfuse
