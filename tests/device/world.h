// SPDX-License-Identifier: BSD-3-Clause
// world.h: the state of the machine, for the files that implement it.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <tuple>

#include "machine.h"

namespace fake {

// One access, remembered as long as a later one may conflict with it.
struct Access {
    StreamNumber stream;
    uint64_t time; // the stream's own component when it was launched
    size_t begin, end;
    bool write;
    std::string name;
};

// A block of memory. It is never given back, so that what a slow stream still
// does with it after it was freed is seen.
struct Block {
    char *base;
    size_t size;
    StreamNumber owner;
    uint64_t graph = 0; // whose pool it is in
    bool in_use = true;
    std::set<StreamNumber> recorded;
    Clock reusable; // in the past of the host: it may be allocated again
    std::vector<Access> accesses;
};

struct Stream {
    int device;
    Clock clock;
    uint64_t capture = 0;
    uint64_t worked = 0; // the clock's own component at the last launch
};

// A copy that is yet to be made.
struct Late {
    StreamNumber stream;
    uint64_t time;
    void *to;
    const void *from;
    size_t bytes;
};

struct World {
    std::mutex lock;             // guards everything below
    std::vector<Stream> streams; // [HOST] is the host
    std::vector<StreamNumber> pools[DEVICES];
    size_t given = 0;                                                     // streams of full pools
    std::map<const char *, std::unique_ptr<Block>> blocks;                // by base
    // By the owner, its graph, and size.
    std::map<std::tuple<StreamNumber, uint64_t, size_t>, std::vector<Block *>> free;
    std::vector<Late> late; // in the order in which they were launched
    std::vector<std::string> races, launches;
    bool watching = true, logging = false, replaying = false;
    int64_t moved = 0; // bytes

    World();
    Clock &host() { return streams[HOST].clock; }
};

World &world(); // lives until the process ends

// With the lock held:
void join(Clock *into, const Clock &other);
bool happened(const Clock &clock, StreamNumber stream, uint64_t time);
bool is_past(const Clock &clock, const Clock &of);
uint64_t tick(World &w, StreamNumber stream); // begins work after all the host has seen
Block *block_at(World &w, const void *address);
uint64_t launch_at(World &w, StreamNumber stream, const std::string &name,
                   const std::vector<Range> &ranges);
void touch(World &w, StreamNumber stream, uint64_t time, const std::string &name,
           const Range &range);
void make_late(World &w); // copies for which the host has waited
void make_all_late(World &w);
void arrive_at(World &w, StreamNumber stream, const Range &range);
bool is_late(const World &w, const Block &block); // whether a late copy needs it
// The owner may use the block again as soon as `clock` is past.
void check_free(World &w, const Block &block, const Clock &clock);

} // namespace fake
