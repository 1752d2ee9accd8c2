// SPDX-License-Identifier: BSD-3-Clause
// trials.cpp: see trials.h. What is compared are bits, since a sum of zeros may be -0.0, on numbers
// that show the order of a sum, on those that are special, and on the real ones.
#include "promises/trials.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/util/TypeCast.h>

#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "base/clock.h"
#include "base/mkl.h"
#include "base/parallel.h"
#include "base/plain_mode.h"
#include "guard.h"
#include "memory/memory.h"
#include "memory/trial_matrices.h"
#include "promises/linear.h"

namespace optfuse {
namespace {

using Key = std::array<int64_t, 20>;
constexpr int kUsesBefore = 2; // a shape that comes so seldom is not worth a trial
constexpr size_t kMostKeys = 1024;
constexpr double kShare = 0.01;      // of the time since the first call
constexpr double kProducts = 12;     // that a trial takes
constexpr int kUsesEnough = 100;     // for a trial at once: it takes 12 % of their time, then less
constexpr uint64_t kTimesAgain = 64; // uses until times are taken once more, then twice as many

struct Entry {
    int uses = 0; // before its trial
    bool is_tried = false, is_equal = false;
    double whole = 0, panels = 0; // least seconds seen; 0: none yet
    uint64_t promised = 0, again = kTimesAgain;
};

struct Trials {
    std::mutex lock;
    std::map<Key, Entry> entries;
    double began = 0, spent = 0; // seconds
};

Trials &trials() {
    static auto *only = new Trials; // leaked: threads may outlive destructors
    return *only;
}

// The gradient that a trial is about.
struct Asked {
    const at::Tensor &dy, &x;
    at::ScalarType dtype; // of the parameter's gradient

    at::Tensor whole() const {
        const at::Tensor product = dy.t().mm(x);
        if (dtype == product.scalar_type())
            return product;
        at::Tensor cast = at::empty(product.sizes(), at::TensorOptions(dtype));
        cast_numbers(data_of(product.unsafeGetTensorImpl()), product.scalar_type(),
                     data_of(cast.unsafeGetTensorImpl()), dtype, product.numel());
        return cast;
    }
    SharedProduct by_panels() const {
        SharedProduct found = std::make_shared<const LinearProduct>(dy, x);
        return dtype == x.scalar_type() ? found : cast_product(std::move(found), dtype);
    }
};

// All that may change how PyTorch multiplies.
Key key_of(const Asked &of) {
    const at::Tensor &dy = of.dy, &x = of.x;
    const ProductSettings now = product_settings();
    return {dy.size(0),
            dy.size(1),
            x.size(1),
            dy.stride(0),
            dy.stride(1),
            x.stride(0),
            x.stride(1),
            offset_in_line(dy),
            offset_in_line(x),
            static_cast<int64_t>(x.scalar_type()),
            static_cast<int64_t>(of.dtype),
            now[0], now[1], now[2], now[3], now[4], now[5], now[6], now[7], now[8]};
}

// Whether each panel, computed as for an update, has the bits of its rows of the whole.
bool are_equal(const Asked &of) {
    const at::Tensor whole = of.whole();
    const SharedProduct product = of.by_panels();
    const auto *at = static_cast<const char *>(data_of(whole.unsafeGetTensorImpl()));
    std::atomic<bool> equal{whole.is_contiguous()};
    product->each_panel([&](int64_t first, int64_t end) {
        const void *panel = equal ? product->panel(first, end) : nullptr;
        const size_t bytes = static_cast<size_t>(end - first) * product->row_bytes();
        const char *rows = at + static_cast<size_t>(first) * product->row_bytes();
        if (panel == nullptr || std::memcmp(panel, rows, bytes) != 0)
            equal = false;
    });
    return equal;
}

bool is_equal_on_all(const Asked &of) {
    Draws draws;
    for (const TrialNumbers kind : kTrialNumbers)
        if (!are_equal({trial_matrix(of.dy, kind, draws), trial_matrix(of.x, kind, draws), of.dtype}))
            return false;
    return are_equal(of);
}

void note_least(double *least, double seconds) {
    if (*least == 0 || seconds < *least)
        *least = seconds;
}

// As an update reads a gradient. The sum is of no use but that it can't be left out.
uint64_t read_all(const at::Tensor &whole) {
    const auto *at = static_cast<const uint64_t *>(data_of(whole.unsafeGetTensorImpl()));
    const auto n = static_cast<int64_t>(whole.nbytes() / sizeof *at);
    std::atomic<uint64_t> sum{0};
    in_parallel(n, 1 << 14, [&](int64_t begin, int64_t end) {
        uint64_t part = 0;
        for (int64_t i = begin; i < end; i++)
            part ^= at[i];
        sum ^= part;
    });
    return sum;
}

// The whole goes to memory and comes back; panels stay in the cache.
void time_both(Entry *entry, const Asked &of) {
    const double began = seconds_now();
    const volatile uint64_t read = read_all(of.whole());
    const double between = seconds_now();
    (void)read;
    const SharedProduct product = of.by_panels();
    product->each_panel([&](int64_t first, int64_t end) { product->panel(first, end); });
    note_least(&entry->whole, between - began);
    note_least(&entry->panels, seconds_now() - between);
}

bool has_time(const Trials &all, double seconds) {
    return all.spent + seconds <= kShare * (seconds_now() - all.began);
}

Verdict verdict_of(const Entry &entry, bool forced) {
    if (!entry.is_tried)
        return Verdict::UNTRIED;
    if (!entry.is_equal && OF_GUARD(product_bits))
        return Verdict::DIFFERENT;
    return forced || entry.panels <= entry.whole ? Verdict::EQUAL : Verdict::SLOWER;
}

// How long the whole product takes is noted first, to know what a trial would cost.
void try_now(const Trials &all, Entry *entry, const Asked &of, bool forced) {
    const bool is_worth_it = forced || entry->uses >= kUsesEnough;
    if (is_worth_it || (entry->whole != 0 && has_time(all, kProducts * entry->whole))) {
        entry->is_equal = is_equal_on_all(of);
        entry->is_tried = true;
    }
    if (!forced && (entry->whole == 0 || entry->is_equal))
        time_both(entry, of);
}

} // namespace

Verdict try_panels(const at::Tensor &dy, const at::Tensor &x, at::ScalarType dtype, bool forced) {
    const Asked of{dy, x, dtype};
    Trials &all = trials();
    const std::lock_guard<std::mutex> guard(all.lock);
    if (all.began == 0)
        all.began = seconds_now();
    const Key key = key_of(of);
    const auto found = all.entries.find(key);
    if (found == all.entries.end() && all.entries.size() >= kMostKeys)
        all.entries.clear(); // those that are in use come again
    Entry &entry = found == all.entries.end() ? all.entries[key] : found->second;
    const PlainMode plain;
    const double began = seconds_now();
    if (!entry.is_tried && (++entry.uses > kUsesBefore || forced))
        try_now(all, &entry, of, forced);
    if (entry.is_equal && ++entry.promised >= entry.again && !forced &&
        has_time(all, 2 * entry.whole)) {
        time_both(&entry, of);
        entry.again *= 2;
    }
    all.spent += seconds_now() - began;
    return verdict_of(entry, forced);
}

std::mutex &trials_lock() {
    return trials().lock;
}

} // namespace optfuse
