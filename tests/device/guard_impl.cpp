// SPDX-License-Identifier: BSD-3-Clause
// guard_impl.cpp: devices, streams and events for torch's device guards, its
// autograd engine and torch.Stream, torch.Event.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/version.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "device.h"

namespace fake {
namespace {

std::atomic<int64_t> visited{0};

// CUDA's functions for events go to the event's device and back; going back makes
// a context where there was none.
void note_visit(c10::DeviceIndex device) {
    visited += device != current_device();
}

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kDevice; }
    c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }

    c10::Device getDevice() const override { return {kDevice, current_device()}; }
    void setDevice(c10::Device device) const override { set_current_device(device.index()); }
    void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
    c10::Device exchangeDevice(c10::Device device) const override {
        const c10::Device old = getDevice();
        setDevice(device);
        return old;
    }

    c10::Stream getStream(c10::Device device) const override {
        return torch_stream(current_stream(index(device)));
    }
    c10::Stream getDefaultStream(c10::Device device) const override {
        return torch_stream(default_stream(index(device)));
    }
    c10::Stream getNewStream(c10::Device device, int) const override {
        return torch_stream(new_stream(index(device)));
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
        return getNewStream(device, 0);
    }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        const c10::Stream old = getStream(stream.device());
        set_current_stream(number_of(stream));
        return old;
    }
    void *getStreamNativeHandle(const c10::Stream stream) const override {
        return handle_of(number_of(stream));
    }
    bool queryStream(const c10::Stream &stream) const override {
        return is_done(number_of(stream));
    }
    void synchronizeStream(const c10::Stream &stream) const override {
        synchronize(number_of(stream));
    }
    void synchronizeDevice(const c10::DeviceIndex device) const override {
        synchronize_device(device);
    }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 12
    bool isStreamCapturing(const c10::Stream &stream) const override {
        return capture_of(number_of(stream)) != 0;
    }
#endif

    void record(void **event, const c10::Stream &stream, const c10::DeviceIndex,
                const c10::EventFlag) const override {
        note_visit(stream.device_index());
        if (*event == nullptr)
            *event = new Event;
        fake::record(static_cast<Event *>(*event), number_of(stream));
    }
    void block(void *event, const c10::Stream &stream) const override {
        note_visit(stream.device_index());
        if (event != nullptr)
            wait(number_of(stream), *static_cast<Event *>(event));
    }
    bool queryEvent(void *event) const override {
        return event == nullptr || is_done(*static_cast<Event *>(event));
    }
    void synchronizeEvent(void *event) const override {
        if (event != nullptr)
            synchronize(*static_cast<Event *>(event));
    }
    void destroyEvent(void *event, const c10::DeviceIndex device) const noexcept override {
        note_visit(device);
        delete static_cast<Event *>(event);
    }
    void recordDataPtrOnStream(const c10::DataPtr &data, const c10::Stream &stream) const override {
        record_use(data.get(), number_of(stream));
    }

  private:
    static c10::DeviceIndex index(c10::Device device) {
        return device.has_index() ? device.index() : current_device();
    }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl)

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return DEVICES; }
    c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
    void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        const c10::DeviceIndex old = current_device();
        set_current_device(device);
        return old;
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
        return exchangeDevice(device);
    }
    c10::Device getDeviceFromPtr(void *data) const override {
        return {kDevice, static_cast<c10::DeviceIndex>(device_of_memory(data))};
    }
    bool isPinnedPtr(const void *data) const override { return is_pinned(data); }
    c10::Allocator *getPinnedMemoryAllocator() const override { return pinned_allocator(); }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override {
        const c10::DeviceGuard guard(storage.device());
        c10::DataPtr fresh = allocator()->allocate(bytes);
        const size_t kept = std::min(bytes, storage.nbytes());
        arrive(current_stream(storage.device().index()), {storage.data(), kept, false});
        if (kept != 0)
            std::memcpy(fresh.get(), storage.data(), kept);
        storage.set_data_ptr_noswap(std::move(fresh));
        storage.set_nbytes(bytes);
    }
};

[[maybe_unused]] const bool hooked = [] {
    at::RegisterPrivateUse1HooksInterface(new Hooks); // lives until the process ends
    return true;
}();

} // namespace

int64_t visits() { return visited; }

} // namespace fake
