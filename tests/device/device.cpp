// SPDX-License-Identifier: BSD-3-Clause
// device.cpp: devices and streams of a thread, and the allocator.
#include "device.h"
#include "graphs.h"

#include <array>
#include <cstring>

namespace fake {
namespace {

thread_local c10::DeviceIndex the_device = 0;
thread_local std::array<StreamNumber, DEVICES> streams = {}; // 0: the default one

void free_memory(void *memory) {
    release(memory);
}

struct Memory : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        const c10::DeviceIndex device = current_device();
        if (void *again = bytes != 0 ? memory_again() : nullptr)
            return {again, nullptr, [](void *) {}, c10::Device(kDevice, device)};
        void *memory = fake::allocate(bytes, current_stream(device));
        note_memory(memory);
        return {memory, memory, &free_memory, c10::Device(kDevice, device)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
    void copy_data(void *to, const void *from, size_t bytes) const override {
        std::memcpy(to, from, bytes);
    }
};

struct Pinned final : Memory {
    c10::DataPtr allocate(size_t bytes) override {
        void *memory = fake::allocate(bytes, HOST);
        return {memory, memory, &free_memory, c10::kCPU};
    }
};

Memory memory; // both live until the process ends
Pinned pinned;
REGISTER_ALLOCATOR(kDevice, &memory)

} // namespace

c10::Allocator *allocator() {
    return &memory;
}
c10::Allocator *pinned_allocator() {
    return &pinned;
}

c10::DeviceIndex current_device() {
    return the_device;
}

void set_current_device(c10::DeviceIndex device) {
    TORCH_CHECK(device >= 0 && device < DEVICES, "there is no device ", int(device));
    the_device = device;
}

StreamNumber current_stream(c10::DeviceIndex device) {
    const StreamNumber stream = streams.at(static_cast<size_t>(device));
    return stream == 0 ? default_stream(device) : stream;
}

void set_current_stream(StreamNumber stream) {
    streams.at(static_cast<size_t>(device_of(stream))) = stream;
}

c10::Stream torch_stream(StreamNumber stream) {
    const c10::Device device(kDevice, static_cast<c10::DeviceIndex>(device_of(stream)));
    const auto id = stream <= DEVICES ? 0 : static_cast<c10::StreamId>(stream);
    return c10::Stream(c10::Stream::UNSAFE, device, id);
}

StreamNumber number_of(const c10::Stream &stream) {
    return stream.id() == 0 ? default_stream(stream.device_index())
                            : static_cast<StreamNumber>(stream.id());
}

} // namespace fake
