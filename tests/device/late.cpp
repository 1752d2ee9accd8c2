// SPDX-License-Identifier: BSD-3-Clause
// late.cpp: copies between the device and pinned memory of the host, which are made when somebody
// waits for them.
#include <algorithm>
#include <cstring>
#include <utility>

#include "world.h"

namespace fake {
namespace {

enum { PATTERN = 0xff }; // NaN in every dtype of floating point, -1 in integers

bool overlap(const void *a, size_t n, const void *b, size_t m) {
    const char *const x = static_cast<const char *>(a), *const y = static_cast<const char *>(b);
    return x < y + m && y < x + n;
}

bool touches(const Late &copy, const Range &range) {
    return overlap(copy.to, copy.bytes, range.address, range.bytes) ||
           (range.write && overlap(copy.from, copy.bytes, range.address, range.bytes));
}

// Makes those that are in the past of the clock, in the order in which they were launched, and
// that `wanted` says.
template <class Wanted> void make(World &w, const Clock &clock, Wanted wanted) {
    const auto made = [&](const Late &copy) {
        if (!happened(clock, copy.stream, copy.time) || !wanted(copy))
            return false;
        std::memcpy(copy.to, copy.from, copy.bytes);
        return true;
    };
    w.late.erase(std::remove_if(w.late.begin(), w.late.end(), made), w.late.end());
}

} // namespace

void make_late(World &w) {
    make(w, w.host(), [](const Late &) { return true; });
}

void make_all_late(World &w) {
    for (const Late &copy : std::exchange(w.late, {}))
        std::memcpy(copy.to, copy.from, copy.bytes);
}

void arrive_at(World &w, StreamNumber stream, const Range &range) {
    Clock clock = w.streams.at(stream).clock;
    join(&clock, w.host());
    make(w, clock, [&](const Late &copy) { return touches(copy, range); });
}

bool is_late(const World &w, const Block &block) {
    return std::any_of(w.late.begin(), w.late.end(), [&](const Late &copy) {
        return touches(copy, {block.base, block.size, true});
    });
}

void arrive(StreamNumber stream, const Range &range) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    arrive_at(w, stream, range);
}

void copy_late(StreamNumber stream, const std::string &name, void *to, const void *from,
               size_t bytes) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    const uint64_t time = launch_at(w, stream, name, {{from, bytes, false}, {to, bytes, true}});
    std::memset(to, PATTERN, bytes);
    w.late.push_back({stream, time, to, from, bytes});
}

} // namespace fake
