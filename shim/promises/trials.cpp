// SPDX-License-Identifier: BSD-3-Clause
// trials.cpp: see trials.h. What is compared are bits, since a sum of zeros may be -0.0: of the
// real product, and on numbers that show the order of a sum or are special.
#include "promises/trials.h"

#include <ATen/ops/mm.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "base/clock.h"
#include "base/parallel.h"
#include "base/plain_mode.h"
#include "guard.h"
#include "memory/memory.h"
#include "memory/trial_matrices.h"
#include "promises/linear.h"

namespace optfuse {
namespace {

using Key = std::array<int64_t, 19>;
constexpr int kUsesBefore = 8; // a shape that comes so seldom is not worth a trial
constexpr size_t kMostKeys = 1024;
constexpr double kShare = 0.01; // of the time since the first call
constexpr double kAdvance = 10; // seconds of that time which are there at once
constexpr double kProducts = 5; // that a trial takes beside the one that backward needs
// Uses until times are taken once more, then twice as many. If panels seem slower they are taken at
// the next use: it needs the whole anyway, and another program may have run meanwhile.
constexpr uint64_t kTimesAgain = 64;

struct Entry {
    int uses = 0;       // before its trial
    double product = 0; // least seconds of the first ones' wholes
    bool is_tried = false, is_equal = false;
    double whole = 0, panels = 0;  // least seconds, taken side by side
    uint64_t since = 0, again = 1; // uses since its trial, and at which times come next
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

// All that may change how PyTorch multiplies.
Key key_of(const at::Tensor &dy, const at::Tensor &x) {
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
            now[0], now[1], now[2], now[3], now[4], now[5], now[6], now[7], now[8]};
}

struct Compared {
    bool is_equal;
    double panels, reading; // seconds, of the whole
};

// Whether each panel, computed as for an update, has the bits of its rows of the whole, which are
// read as an update reads a gradient.
Compared compare(const at::Tensor &dy, const at::Tensor &x, const at::Tensor &whole) {
    const double began = seconds_now();
    const LinearProduct product(dy, x);
    const auto *at = static_cast<const char *>(data_of(whole.unsafeGetTensorImpl()));
    std::atomic<bool> equal{whole.is_contiguous()};
    std::atomic<int64_t> reading{0}; // nanoseconds, of all threads
    product.each_panel([&](int64_t first, int64_t end) {
        const void *panel = equal ? product.panel(first, end) : nullptr;
        const double computed = seconds_now();
        const size_t bytes = static_cast<size_t>(end - first) * product.row_bytes();
        const char *rows = at + static_cast<size_t>(first) * product.row_bytes();
        if (panel == nullptr || std::memcmp(panel, rows, bytes) != 0)
            equal = false;
        reading += static_cast<int64_t>((seconds_now() - computed) * 1e9);
    });
    const double of_each = static_cast<double>(reading) * 1e-9 / thread_count();
    return {equal, seconds_now() - began - of_each, of_each};
}

bool is_equal_on_trial_numbers(const at::Tensor &dy, const at::Tensor &x) {
    Draws draws;
    const auto is_equal_on = [&](TrialNumbers kind) {
        const at::Tensor left = trial_matrix(dy, kind, draws), right = trial_matrix(x, kind, draws);
        return compare(left, right, left.t().mm(right)).is_equal;
    };
    return is_equal_on(TrialNumbers::MIXED) && is_equal_on(TrialNumbers::SPECIAL);
}

void note_least(double *least, double seconds) {
    if (*least == 0 || seconds < *least)
        *least = seconds;
}

bool has_time(const Trials &all, double seconds) {
    return all.spent + seconds <= kShare * (seconds_now() - all.began + kAdvance);
}

Verdict verdict_of(const Entry &entry, bool forced) {
    if (!entry.is_tried)
        return Verdict::UNTRIED;
    if (!entry.is_equal && OF_GUARD(product_bits))
        return Verdict::DIFFERENT;
    return forced || entry.panels <= entry.whole ? Verdict::EQUAL : Verdict::SLOWER;
}

Entry &entry_of(Trials *all, const Key &key) {
    const auto found = all->entries.find(key);
    if (found != all->entries.end())
        return found->second;
    if (all->entries.size() >= kMostKeys)
        all->entries.clear(); // those that are in use come again
    return all->entries[key];
}

// Whether this use is to be compared with panels: first for their bits, then for the times.
bool is_due(const Trials &all, Entry *entry, bool forced) {
    const bool has_its_time = has_time(all, kProducts * entry->product);
    if (!entry->is_tried) {
        entry->uses++;
        return forced || (entry->uses > kUsesBefore && has_its_time);
    }
    const uint64_t least = verdict_of(*entry, false) == Verdict::SLOWER ? 1 : kTimesAgain;
    if (forced || !entry->is_equal || ++entry->since < std::max(entry->again, least) ||
        !has_its_time)
        return false;
    entry->again = 2 * entry->since;
    return true;
}

// The whole goes to memory and comes back; panels stay in the cache.
void try_now(Trials *all, Entry *entry, const at::Tensor &dy, const at::Tensor &x,
             const Whole &multiply) {
    const double began = seconds_now();
    const at::Tensor whole = multiply();
    const double between = seconds_now();
    const PlainMode plain;
    const Compared found = compare(dy, x, whole);
    note_least(&entry->whole, between - began + found.reading);
    note_least(&entry->panels, found.panels);
    entry->is_equal = found.is_equal && (entry->is_tried || is_equal_on_trial_numbers(dy, x));
    entry->is_tried = true;
    all->spent += seconds_now() - between;
}

} // namespace

Verdict try_panels(const at::Tensor &dy, const at::Tensor &x, bool forced, const Whole &whole) {
    Trials &all = trials();
    const std::lock_guard<std::mutex> guard(all.lock);
    if (all.began == 0)
        all.began = seconds_now();
    Entry &entry = entry_of(&all, key_of(dy, x));
    if (is_due(all, &entry, forced)) {
        try_now(&all, &entry, dy, x, whole);
        return forced ? verdict_of(entry, forced) : Verdict::UNTRIED;
    }
    if (!entry.is_tried && entry.uses <= kUsesBefore) { // to know what a trial would cost
        const double began = seconds_now();
        whole();
        note_least(&entry.product, seconds_now() - began);
    }
    return verdict_of(entry, forced);
}

std::mutex &trials_lock() {
    return trials().lock;
}

} // namespace optfuse
