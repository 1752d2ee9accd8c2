// SPDX-License-Identifier: BSD-3-Clause
// device.h: GPUs, as far as PyTorch's generic interface for devices and the
// library of CUDA kernels show them. Nothing here needs CUDA's headers.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/TensorImpl.h>

#include <atomic>

#include "base/pinned.h"
#include "cuda/cuda_kernels.h"
#include "optfuse.h"

namespace optfuse {

// The kind of device beside the CPU: CUDA. (A test-only build can be told
// another one.)
c10::DeviceType gpu_type();
inline bool is_gpu(const c10::Device &device) { return device.type() == gpu_type(); }

// cuda_library.cpp: the functions of liboptfuse_cuda, opened at the first GPU
// tensor. NULL after of_set_error() if it can't be.
struct CudaLibrary {
    decltype(&of_cuda_abi_version) abi_version;
    decltype(&of_cuda_rules) rules;
    decltype(&of_cuda_error) error;
    decltype(&of_cuda_open) open;
    decltype(&of_cuda_prepare) prepare;
    decltype(&of_cuda_launch) launch;
    decltype(&of_cuda_advance) advance;
    decltype(&of_cuda_draw) draw;
    decltype(&of_cuda_prepare_packing) prepare_packing;
    decltype(&of_cuda_pack) pack;
    decltype(&of_cuda_capture) capture;
    decltype(&of_cuda_relax) relax;
};
const CudaLibrary *cuda_library();
void set_cuda_library(const char *path);

// As long as one lives, this thread may wait for a device: others may be capturing a graph.
struct Relaxed : Pinned {
    const CudaLibrary *library = cuda_library();
    Relaxed() { relax(true); }
    ~Relaxed() { relax(false); }
    void relax(bool on) const {
        if (library != nullptr)
            library->relax(on);
    }
};

// device.cpp
extern const of_gpu_host gpu_functions;
of_stream current_stream(int ordinal);
// CUDA's own handle of it.
void *native_stream(const of_stream &stream);
// As long as one lives, current_stream() on this thread asks PyTorch and the driver once and
// not for each parameter: inside step() nobody changes streams or begins a capture. Except
// where code of others runs: there a SteadyStreams(false) lives inside of it.
class SteadyStreams : Pinned {
  public:
    explicit SteadyStreams(bool steady = true) {
        if (know_any())
            enter(steady);
    }
    ~SteadyStreams() {
        if (entered)
            leave();
    }
    // Whether the process has ever had a stream of a GPU.
    static bool know_any() { return any_gpu.load(std::memory_order_relaxed); }

  private:
    friend of_stream current_stream(int ordinal);
    static std::atomic<bool> any_gpu; // has ever been asked for
    void enter(bool steady);
    void leave();
    bool entered = false;
    of_stream found = {}; // of the device last asked for
    of_stream *outer = nullptr;
};
// One stream from PyTorch's pool for all updates and weight gradients beside backward on a device.
int64_t side_stream(int ordinal);
// The stream may still work on the memory when its last reference goes.
void record_on_stream(c10::StorageImpl *storage, const of_stream &stream);
// PyTorch's own allocator for GPUs. It allocates on the current device, for the current stream.
c10::Allocator *gpu_allocator(const c10::Device &device);
// Whether this deleter is that allocator's.
bool is_gpu_deleter(c10::DeleterFnPtr deleter, const c10::Device &device);

} // namespace optfuse
