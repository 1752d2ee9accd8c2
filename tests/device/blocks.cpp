// SPDX-License-Identifier: BSD-3-Clause
// blocks.cpp: the device's memory.
#include <cstdlib>
#include <cstring>
#include <new>

#include "world.h"

namespace fake {

static size_t rounded(size_t bytes) {
    return (bytes + 511) / 512 * 512;
}

Block *block_at(World &w, const void *address) {
    const char *at = static_cast<const char *>(address);
    auto next = w.blocks.upper_bound(at);
    if (next == w.blocks.begin())
        return nullptr;
    Block *block = std::prev(next)->second.get();
    return at < block->base + block->size ? block : nullptr;
}

// The free block that the stream used last and the host knows to be unused,
// NULL if none.
static Block *reuse(World &w, size_t size, StreamNumber stream) {
    std::vector<Block *> &free = w.free[{stream, w.streams.at(stream).capture, size}];
    for (auto at = free.rbegin(); at != free.rend(); ++at)
        if (is_past((*at)->reusable, w.host()) && !(stream == HOST && is_late(w, **at))) {
            Block *block = *at;
            free.erase(std::next(at).base());
            return block;
        }
    return nullptr;
}

static Block *fresh(World &w, size_t size, StreamNumber stream) {
    char *base = static_cast<char *>(std::aligned_alloc(512, size));
    if (base == nullptr)
        throw std::bad_alloc();
    auto block = std::make_unique<Block>();
    block->base = base;
    block->size = size;
    block->owner = stream;
    block->graph = w.streams.at(stream).capture;
    return (w.blocks[base] = std::move(block)).get();
}

void *allocate(size_t bytes, StreamNumber stream) {
    if (bytes == 0)
        return nullptr;
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    const size_t size = rounded(bytes);
    Block *block = reuse(w, size, stream);
    if (block == nullptr)
        block = fresh(w, size, stream);
    block->in_use = true;
    arrive_at(w, stream, {block->base, size, true});
    return block->base;
}

void release(void *memory) noexcept {
    if (memory == nullptr)
        return;
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    Block *block = block_at(w, memory);
    block->in_use = false;
    block->reusable.clear();
    for (const StreamNumber stream : block->recorded)
        join(&block->reusable, w.streams.at(stream).clock);
    block->recorded.clear();
    w.free[{block->owner, block->graph, block->size}].push_back(block);
    if (block->owner == HOST)
        return;
    // Launches of the owner from now on come after all this.
    Clock clock = w.streams.at(block->owner).clock;
    join(&clock, w.host());
    join(&clock, block->reusable);
    if (block->graph < FIRST_RECORDED || w.streams.at(block->owner).capture == block->graph)
        check_free(w, *block, clock); // else it is never used again
}

void record_use(const void *memory, StreamNumber stream) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    Block *block = memory == nullptr ? nullptr : block_at(w, memory);
    if (block != nullptr && stream != block->owner)
        block->recorded.insert(stream);
}

size_t bytes_of(int device, bool reserved) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    size_t bytes = 0;
    for (const auto &[base, block] : w.blocks)
        if ((block->in_use || reserved) && w.streams.at(block->owner).device == device)
            bytes += block->size;
    return bytes;
}

Contents contents() {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    Contents all;
    make_all_late(w); // lest undo() puts back what they are to replace
    for (const auto &[base, block] : w.blocks)
        if (block->in_use && block->owner != HOST)
            all[block->base].assign(block->base, block->base + block->size);
    return all;
}

void undo(const Contents &before, uint64_t graph) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    for (const auto &[base, bytes] : before)
        std::memcpy(base, bytes.data(), bytes.size());
    for (const auto &[base, block] : w.blocks)
        if (block->graph == graph)
            std::memset(block->base, 0xa5, block->size);
}

int device_of_memory(const void *memory) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    const Block *block = block_at(w, memory);
    return block == nullptr ? -1 : w.streams.at(block->owner).device;
}

bool is_pinned(const void *memory) {
    World &w = world();
    const std::lock_guard<std::mutex> guard(w.lock);
    const Block *block = block_at(w, memory);
    return block != nullptr && block->owner == HOST;
}

} // namespace fake
