// SPDX-License-Identifier: BSD-3-Clause
// spread.h: shares arrays out among threads, each array to one thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "base/parallel.h"
#include "floating.h"
#include "optfuse.h"

namespace optfuse {

// Calls run(items, n) of some items at a time, each of which has a number n of elements. On several
// threads the longest come first. All threads compute as this one.
template <class Item, class Run> void spread(std::vector<Item> &items, const Run &run) {
    constexpr size_t kWorthAThread = 32768;
    std::vector<Item *> order;
    size_t total = 0;
    order.reserve(items.size());
    for (Item &item : items) {
        order.push_back(&item);
        total += item.n;
    }
    if (total < kWorthAThread || thread_count() == 1 || of_is_forked())
        return run(order.data(), order.size());
    const auto longer = [](const Item *a, const Item *b) { return a->n > b->n; };
    std::stable_sort(order.begin(), order.end(), longer);
    // Long ones go to threads one by one, the rest by so many at a time.
    constexpr size_t kAtATime = 8;
    const auto is_long = [](const Item *item) { return item->n >= kWorthAThread; };
    const size_t n_long = static_cast<size_t>(std::count_if(order.begin(), order.end(), is_long));
    const size_t n_ranges = n_long + (order.size() - n_long + kAtATime - 1) / kAtATime;
    std::atomic<size_t> next{0};
    const unsigned floating = of_floating_now();
    const auto work = [&](int64_t, int64_t) {
        const unsigned outside = of_floating_now();
        of_floating_set(floating);
        for (size_t range = next++; range < n_ranges; range = next++) {
            const size_t i = range < n_long ? range : n_long + (range - n_long) * kAtATime;
            run(&order[i], range < n_long ? 1 : std::min(kAtATime, order.size() - i));
        }
        of_floating_set(outside);
    };
    in_parallel(thread_count(), 1, work);
}

} // namespace optfuse
