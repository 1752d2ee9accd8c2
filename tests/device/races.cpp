// SPDX-License-Identifier: BSD-3-Clause
// races.cpp: finds accesses that nothing puts in order.
#include <algorithm>

#include "world.h"

namespace fake {
namespace {

thread_local uint64_t launched_here = 0;

const char *verb(bool write) {
    return write ? " writes" : " reads";
}

void add(World &w, const std::string &text) {
    if (w.watching)
        w.races.push_back(text);
}

std::string where(const Block &block, size_t begin, size_t end) {
    return "bytes " + std::to_string(begin) + " to " + std::to_string(end) + " of a block of " +
           std::to_string(block.size) + " of " + name_of(block.owner);
}

bool conflict(const Access &a, const Access &b) {
    return (a.write || b.write) && a.begin < b.end && b.begin < a.end;
}

// Whatever comes after `now` comes after `old` too, or conflicts with `now` as well.
bool replaces(const Access &now, const Access &old, const Clock &clock) {
    return old.begin >= now.begin && old.end <= now.end && (now.write || !old.write) &&
           happened(clock, old.stream, old.time);
}

void compare(World &w, const Block &block, const Access &now, const Clock &clock) {
    for (const Access &old : block.accesses)
        if (conflict(old, now) && !happened(clock, old.stream, old.time))
            add(w, now.name + " on " + name_of(now.stream) + verb(now.write) + " what " + old.name +
                       " on " + name_of(old.stream) + verb(old.write) +
                       ", and nothing puts the two in order: " +
                       where(block, std::max(old.begin, now.begin), std::min(old.end, now.end)));
}

} // namespace

void touch(World &w, StreamNumber stream, uint64_t time, const std::string &name,
           const Range &range) {
    if (range.bytes == 0)
        return;
    Block *block = block_at(w, range.address);
    if (block == nullptr) {
        add(w, name + verb(range.write) + " memory that is not the device's, nor pinned");
        return;
    }
    const size_t begin =
        static_cast<size_t>(static_cast<const char *>(range.address) - block->base);
    const Access now = {stream, time, begin, begin + range.bytes, range.write, name};
    if (!block->in_use && !(w.replaying && block->graph != 0))
        add(w, name + verb(range.write) +
                   " memory that is free: " + where(*block, now.begin, now.end));
    if (now.end > block->size)
        add(w, name + verb(range.write) + " past the end of its memory");
    if (block->owner != HOST && w.streams.at(stream).device != w.streams.at(block->owner).device)
        add(w, name + " on " + name_of(stream) + verb(range.write) +
                   " memory of another device: " + where(*block, now.begin, now.end));
    const Clock &clock = w.streams.at(stream).clock;
    compare(w, *block, now, clock);
    auto &accesses = block->accesses;
    accesses.erase(std::remove_if(accesses.begin(), accesses.end(),
                                  [&](const Access &old) { return replaces(now, old, clock); }),
                   accesses.end());
    accesses.push_back(now);
}

void check_free(World &w, const Block &block, const Clock &clock) {
    for (const Access &old : block.accesses)
        if (!happened(clock, old.stream, old.time))
            add(w, "memory is freed that " + old.name + " on " + name_of(old.stream) +
                       verb(old.write) + ", and " + name_of(block.owner) +
                       " may use it again before that (record_stream is missing): " +
                       where(block, old.begin, old.end));
}

uint64_t launch_at(World &w, StreamNumber stream, const std::string &name,
                   const std::vector<Range> &ranges) {
    const uint64_t time = tick(w, stream);
    launched_here++;
    w.streams[stream].worked = time;
    for (const Range &range : ranges) {
        arrive_at(w, stream, range);
        touch(w, stream, time, name, range);
    }
    // Our kernels read what they write; that of scalings says so itself.
    const bool reads = name.rfind("of_cuda_", 0) == 0 && name.rfind("of_cuda_scaling_", 0) != 0;
    for (const Range &range : ranges)
        w.moved += static_cast<int64_t>(range.bytes) * (range.write && reads ? 2 : 1);
    if (w.logging)
        w.launches.push_back(name + " on " + name_of(stream));
    return time;
}

void launch(StreamNumber stream, const std::string &name, const std::vector<Range> &ranges) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    launch_at(w, stream, name, ranges);
}

uint64_t launches_of_thread() {
    return launched_here;
}

void set_replaying(bool replaying) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    w.replaying = replaying;
}

void report(const std::string &defect) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    add(w, defect);
}

void set_watching(bool watching) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    w.watching = watching;
}

std::vector<std::string> races() {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    return w.races;
}

void clear() {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    w.races.clear();
    for (auto &[base, block] : w.blocks)
        block->accesses.clear();
}

void set_logging(bool logging) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    w.logging = logging;
    w.launches.clear();
}

int64_t bytes_moved() {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    return w.moved;
}

std::vector<std::string> launches() {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    return w.launches;
}

} // namespace fake
