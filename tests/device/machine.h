// SPDX-License-Identifier: BSD-3-Clause
// machine.h: a GPU that is not there: streams, events, memory, and who may use
// it when. It knows nothing of torch.
//
// Work runs at once, in the order in which the host launches it. What a real
// GPU could have done instead is found out with vector clocks: a clock has one
// component for the host and one for each stream. Two accesses to the same
// bytes, one of them a write, that neither a stream nor an event nor a waiting
// host puts in order are a race. All threads of the host count as one: their
// own order is the business of locks, not of streams.
//
// Threads: every function may be called from any thread; one lock guards all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

// Functions of libfake_cuda.so that others call.
#define FAKE_SHARED __attribute__((visibility("default")))

namespace fake {

enum { HOST = 0, DEVICES = 2, POOL = 32 };

using Clock = std::vector<uint64_t>; // missing components are 0

// A stream's number is its component in the clocks. 1 to DEVICES are the
// devices' default streams; HOST is the host.
using StreamNumber = size_t;

StreamNumber default_stream(int device);
StreamNumber new_stream(int device); // one of a pool, in turn, as PyTorch has it
int device_of(StreamNumber stream);
std::string name_of(StreamNumber stream);

// As CUDA has it: a default stream has no handle, it is that of the current
// device. 0 is returned for what is no stream's handle.
void *handle_of(StreamNumber stream);
StreamNumber stream_of(const void *handle, int current_device);

// The bytes that an operator or kernel reads or writes.
struct Range {
    const void *address;
    size_t bytes;
    bool write;
};

// Work on a stream, which has been done or is about to be. Memory that is neither the device's nor
// pinned, or is free, is reported too.
FAKE_SHARED void launch(StreamNumber stream, const std::string &name,
                        const std::vector<Range> &ranges);

// A copy between the device and pinned memory. A GPU may make it at any time until somebody waits
// for it; this one makes it as late as it can: when the host has waited, or work that comes behind
// it is about to use its memory. Until then the target holds a pattern, and whoever changes the
// source changes what is copied.
void copy_late(StreamNumber stream, const std::string &name, void *to, const void *from,
               size_t bytes);
// Work on the stream is about to use these bytes: makes the late copies before it.
void arrive(StreamNumber stream, const Range &range);

// The memory of an event: all that was launched before it on its stream, and the graph that
// was being captured there.
struct Event {
    Clock clock;
    uint64_t capture = 0;
};

void record(Event *event, StreamNumber stream);
void wait(StreamNumber stream, const Event &event);
void wait_for(StreamNumber stream, StreamNumber other);
// The host waits.
void synchronize(const Event &event);
void synchronize(StreamNumber stream);
void synchronize_device(int device);

// Whether it has completed. A GPU may be slow, and this one is as slow as it
// can be: work is done when the host has waited for it.
bool is_done(const Event &event);
bool is_done(StreamNumber stream);

// Blocks of memory, kept as PyTorch's caching allocator does: a block belongs
// to the stream that was current when it was allocated, and can be allocated
// again there as soon as it is freed; later, if other streams were recorded for
// it. One of the HOST is pinned memory, and can be allocated again when no late copy needs it.
// allocate() returns NULL for no bytes.
void *allocate(size_t bytes, StreamNumber stream);
void release(void *memory) noexcept;
void record_use(const void *memory, StreamNumber stream);
size_t bytes_of(int device, bool reserved); // in use, or all that the allocator has taken
int device_of_memory(const void *memory); // -1 if it is the host's
bool is_pinned(const void *memory);

// A graph is being captured on the stream; 0: no more. A stream that waits for it meanwhile is
// captured, too. One that the first stream has not waited for in the end is reported, as CUDA
// fails then (cudaErrorStreamCaptureUnjoined).
void set_capture(StreamNumber stream, uint64_t id);
uint64_t capture_of(StreamNumber stream);

// A graph of such a number is recorded (graphs.h): while it is captured, the host can't wait for
// its streams. Memory that is allocated on a captured stream is the graph's for ever.
enum : uint64_t { FIRST_RECORDED = 1000 };
// The content of the memory in use; undo() puts it back, and destroys what the graph allocated.
using Contents = std::map<char *, std::vector<char>>;
Contents contents();
void undo(const Contents &before, uint64_t graph);
// The graph's memory may be used, though its tensors are gone.
void set_replaying(bool replaying);
uint64_t launches_of_thread(); // ever

// Whether accesses are watched; they are at first. What was seen is forgotten
// by clear(); so are accesses to memory until then.
void set_watching(bool watching);
void report(const std::string &defect);
std::vector<std::string> races();
void clear();
// A log of launches since log(true): "name on stream".
void set_logging(bool logging);
int64_t bytes_moved(); // ever, by launches
std::vector<std::string> launches();

} // namespace fake
