// SPDX-License-Identifier: BSD-3-Clause
// device.cpp: the core's streams, events and launches, over PyTorch's guard for
// devices and the library of CUDA kernels.
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "base/compat.h"
#include "base/device.h"
#include "base/error.h"
#include "base/plain_mode.h"
#include "guard.h"

namespace optfuse {
namespace {

c10::Device device_at(int ordinal) {
    return c10::Device(gpu_type(), static_cast<c10::DeviceIndex>(ordinal));
}

c10::Stream stream_of(const of_stream &stream) {
    return c10::Stream(c10::Stream::UNSAFE, device_at(stream.device), stream.id);
}

c10::impl::VirtualGuardImpl guard_impl() { return c10::impl::VirtualGuardImpl(gpu_type()); }

constexpr uint64_t UNKNOWN = UINT64_MAX; // what the driver says where it fails

uint64_t capture_of(const c10::Stream &stream) {
    uint64_t id = 0;
    const CudaLibrary *library = cuda_library();
    if (library != nullptr && library->capture(stream.device_index(), stream.native_handle(),
                                               &id) != OF_CUDA_OK)
        return UNKNOWN;
    return id;
}

bool same_capture(const of_stream &stream) {
    const uint64_t now = capture_of(stream_of(stream));
    if (now == UNKNOWN || stream.capture == UNKNOWN) {
        of_set_error("the driver can't say whether the stream of an update is being captured "
                     "into a CUDA graph (%s): an earlier error of the GPU is the usual reason",
                     now == UNKNOWN ? cuda_library()->error() : "when the update was made");
        return false;
    }
    if (!OF_GUARD(capture) || now == stream.capture)
        return true;
    of_set_error(stream.capture == 0
                     ? "the stream of an update made before is being captured into a CUDA graph "
                       "now; call optfuse.flush() and torch.cuda.synchronize() before the capture"
                     : "an update made inside a CUDA graph capture was left behind by it; call "
                       "step() inside the capture, or run the whole backward pass in it");
    return false;
}

std::string range_name(const of_gpu_update &update, const of_gpu_entry *entries, size_t n) {
    size_t elements = 0;
    for (size_t i = 0; i < n; i++)
        elements += entries[i].n;
    return std::string("optfuse::") + update.rule + " " + std::to_string(n) + " parameters, " +
           std::to_string(elements) + " " + of_dtype_name(update.dtype);
}

bool succeeded(const CudaLibrary *library, of_cuda_status status) {
    if (status != OF_CUDA_OK)
        of_set_error("%s", library->error());
    return status == OF_CUDA_OK;
}

bool count(void *, const of_stream *stream, float *const *steps, size_t n,
           const float *less_at) {
    return attempt("counting steps", "", false, [&] {
        const CudaLibrary *library = cuda_library();
        if (library == nullptr || !same_capture(*stream))
            return false;
        const c10::DeviceGuard device(device_at(stream->device));
        return succeeded(library, library->advance(steps, n, less_at, stream->device,
                                                   stream_of(*stream).native_handle()));
    });
}

bool launch(void *, const of_stream *stream, of_gpu_update *update, const of_gpu_entry *entries,
            size_t n) {
    return attempt("the launch of an update", "", false, [&] {
        const CudaLibrary *library = cuda_library();
        if (library == nullptr || !same_capture(*stream))
            return false;
        const c10::DeviceGuard device(device_at(stream->device));
        at::RecordFunction range(at::RecordScope::USER_SCOPE);
        if (range.isActive())
            range.before(range_name(*update, entries, n));
        update->device = stream->device;
        update->stream = stream_of(*stream).native_handle();
        return succeeded(library, library->launch(update, entries, n));
    });
}

struct Event {
    void *native = nullptr;
    c10::DeviceIndex device = 0;
};

// PyTorch's functions for events go to the device and back by themselves, and
// going back makes a context, with some hundred megabytes, on a device that this
// process may never have used. Its guard does not.
using OnDevice = c10::DeviceGuard;

bool record(void *, const of_stream *stream, void **event) {
    return attempt("recording an event", "", false, [&] {
        if (!same_capture(*stream))
            return false;
        const OnDevice guard(device_at(stream->device));
        if (*event == nullptr)
            *event = new Event;
        auto *made = static_cast<Event *>(*event);
        made->device = static_cast<c10::DeviceIndex>(stream->device);
        guard_impl().record(&made->native, stream_of(*stream), made->device,
                            c10::EventFlag::PYTORCH_DEFAULT);
        return true;
    });
}

bool wait(void *, const of_stream *stream, void *event) {
    return attempt("waiting for an event", "", false, [&] {
        const OnDevice guard(device_at(stream->device));
        guard_impl().block(static_cast<Event *>(event)->native, stream_of(*stream));
        return true;
    });
}

bool is_done(void *, void *event) {
    const Relaxed relaxed;
    return attempt("asking for an event", "", false, [&] {
        const auto *made = static_cast<Event *>(event);
        const OnDevice guard(device_at(made->device));
        return guard_impl().queryEvent(made->native);
    });
}

bool synchronize(void *, void *event) {
    const Relaxed relaxed;
    return attempt("synchronizing with an event", "", false, [&] {
        const auto *made = static_cast<Event *>(event);
        const OnDevice guard(device_at(made->device));
        guard_impl().synchronizeEvent(made->native);
        return true;
    });
}

void destroy(void *, void *event) {
    auto *made = static_cast<Event *>(event);
    attempt("destroying an event", "", false, [&] {
        const OnDevice guard(device_at(made->device));
        guard_impl().destroyEvent(made->native, made->device);
        return true;
    });
    delete made;
}

of_stream current(void *, int ordinal) { return current_stream(ordinal); }

void exchange(void *, const of_stream *stream) { guard_impl().exchangeStream(stream_of(*stream)); }

enum { NOT_ASKED = -1 }; // in place of a device

thread_local of_stream *steady_stream = nullptr;

} // namespace

const of_gpu_host gpu_functions = {sizeof(of_gpu_host), current, exchange,    count,   launch, record,
                                   wait,                is_done, synchronize, destroy};

c10::DeviceType gpu_type() {
#ifdef OF_TEST_GUARDS
    static const bool stand_in = [] {
        const char *name = std::getenv("OPTFUSE_TEST_DEVICE");
        return name != nullptr && std::strcmp(name, "privateuseone") == 0;
    }();
    if (stand_in)
        return c10::DeviceType::PrivateUse1;
#endif
    return c10::DeviceType::CUDA;
}

of_stream current_stream(int ordinal) {
    of_stream *const steady = steady_stream;
    SteadyStreams::any_gpu.store(true, std::memory_order_relaxed);
    if (steady != nullptr && steady->device == ordinal)
        return *steady;
    const c10::Stream stream = guard_impl().getStream(device_at(ordinal));
    const of_stream current = {ordinal, stream.id(), capture_of(stream)};
    if (steady != nullptr)
        *steady = current;
    return current;
}

void *native_stream(const of_stream &stream) { return stream_of(stream).native_handle(); }

std::atomic<bool> SteadyStreams::any_gpu{false};

void SteadyStreams::enter(bool steady) {
    entered = true;
    found.device = NOT_ASKED;
    outer = std::exchange(steady_stream, steady ? &found : nullptr);
}

void SteadyStreams::leave() {
    if (outer != nullptr)
        outer->device = NOT_ASKED;
    steady_stream = outer;
}

int64_t side_stream(int ordinal) {
    static std::mutex lock; // guards streams
    static auto *streams = new std::unordered_map<int, int64_t>;
    const std::lock_guard<std::mutex> guard(lock);
    const auto known = streams->find(ordinal);
    if (known != streams->end())
        return known->second;
    return (*streams)[ordinal] = guard_impl().getStreamFromGlobalPool(device_at(ordinal)).id();
}

void record_on_stream(c10::StorageImpl *storage, const of_stream &stream) {
    attempt("recording memory on a stream", "", false, [&] {
        guard_impl().recordDataPtrOnStream(storage->_mutable_data_ptr_no_checks(),
                                           stream_of(stream));
        return true;
    });
}

namespace {

struct Memory {
    c10::Allocator *allocator;
    c10::DeleterFnPtr deleter;
};

// Learned from a tensor, because PyTorch has several allocators to choose from.
const Memory &memory_of(const c10::Device &device) {
    static const Memory own = [&] {
        const PlainMode plain;
        const at::Tensor any = at::empty({1}, at::TensorOptions().device(device));
        const c10::Storage &storage = any.storage();
        return Memory{storage.allocator(), storage.data_ptr().get_deleter()};
    }();
    return own;
}

} // namespace

c10::Allocator *gpu_allocator(const c10::Device &device) { return memory_of(device).allocator; }

bool is_gpu_deleter(c10::DeleterFnPtr deleter, const c10::Device &device) {
    return deleter == memory_of(device).deleter;
}

} // namespace optfuse
