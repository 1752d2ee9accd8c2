// SPDX-License-Identifier: BSD-3-Clause
// packed.cpp: see packed.h.
#include "kfac/packed.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <array>
#include <atomic>
#include <string>

#include "base/device.h"
#include "base/error.h"
#include "guard.h"

namespace optfuse {
namespace {

of_dtype dtype_of(const at::Tensor &t) {
    const bool is_wide = t.scalar_type() == at::kDouble;
    if ((!is_wide && t.scalar_type() != at::kFloat) || !t.is_contiguous())
        fail("optfuse: factors are contiguous, and float32 or float64");
    return is_wide ? OF_FLOAT64 : OF_FLOAT32;
}

const of_packing_row &row_for(const at::Tensor &t) {
    return *of_packing_find(dtype_of(t), of_isa_detect());
}

// Loading may have to wait for the device, and another thread may be capturing a graph: so all
// kernels are loaded with the first one that a device is to run, inside kfac().
void prepare(const CudaLibrary *library, of_dtype dtype, const c10::Device &device) {
    static std::array<std::array<std::atomic<bool>, 2>, 64> prepared; // ones are never taken back
    const auto ordinal = static_cast<size_t>(device.index());
    std::atomic<bool> *known =
        ordinal < prepared.size() ? &prepared[ordinal][dtype == OF_FLOAT64] : nullptr;
    if (known != nullptr && known->load(std::memory_order_relaxed))
        return;
    library->relax(true);
    const of_cuda_status status = library->prepare_packing(dtype, device.index());
    library->relax(false);
    if (status != OF_CUDA_OK)
        fail(std::string("optfuse: factors on a GPU: ") + library->error());
    if (known != nullptr)
        known->store(true, std::memory_order_relaxed);
}

// On the current stream. `to` and `from` may be of another one, if that has been waited for.
void run_on_gpu(of_cuda_packing packing, const at::Tensor &to, const at::Tensor &from) {
    const c10::Device device = to.device();
    if (!is_gpu(device))
        fail("optfuse: factors are on the CPU or an NVIDIA GPU, not on " + device.str() +
             ": train the model there, or without optfuse.kfac()");
    const CudaLibrary *library = cuda_library();
    if (library == nullptr)
        fail(std::string("optfuse: factors on a GPU: ") + of_error_message());
    const of_stream stream = current_stream(device.index());
    if (OF_GUARD(capture) && stream.capture != 0)
        fail("optfuse: K-FAC's factors can't be collected while a CUDA graph is captured, because "
             "its replays would not be counted: run the passes of a step that collects them "
             "(factors_every=) without the graph, and capture those of another step");
    const c10::DeviceGuard guard(device);
    packing.dtype = dtype_of(to);
    packing.device = device.index();
    packing.stream = native_stream(stream);
    packing.to = to.mutable_data_ptr();
    packing.from = from.const_data_ptr();
    prepare(library, packing.dtype, device);
    if (library->pack(&packing) != OF_CUDA_OK)
        fail(std::string("optfuse: factors on a GPU: ") + library->error());
    for (const at::Tensor *used : {&to, &from})
        record_on_stream(used->storage().unsafeGetStorageImpl(), stream);
}

of_cuda_packing task(of_cuda_packing_task what, size_t n, double first, double second = 0) {
    of_cuda_packing packing = {};
    packing.task = what;
    packing.n = packing.ld = n;
    packing.numbers[0] = first;
    packing.numbers[1] = second;
    return packing;
}

} // namespace

void add_packed(const at::Tensor &packed, const at::Tensor &matrix, double scale) {
    const auto size = static_cast<size_t>(matrix.size(0));
    if (!packed.is_cpu()) {
        run_on_gpu(task(OF_CUDA_PACKING_ADD, size, scale), packed, matrix);
        return;
    }
    row_for(packed).add(packed.mutable_data_ptr(), matrix.const_data_ptr(), size, size, scale);
}

void merge_packed(const at::Tensor &running, const at::Tensor &sums, double decay, double weight) {
    const auto size = static_cast<size_t>(running.numel());
    if (!running.is_cpu()) {
        run_on_gpu(task(OF_CUDA_PACKING_MERGE, size, decay, weight), running, sums);
        return;
    }
    row_for(running).merge(running.mutable_data_ptr(), sums.const_data_ptr(), size, decay, weight);
}

at::Tensor unpacked(const at::Tensor &packed, int64_t d, double damping) {
    const at::Tensor full = at::empty({d, d}, packed.options());
    const auto size = static_cast<size_t>(d);
    if (!packed.is_cpu())
        run_on_gpu(task(OF_CUDA_PACKING_UNPACK, size, damping), full, packed);
    else
        row_for(packed).unpack(full.mutable_data_ptr(), packed.const_data_ptr(), size, size,
                               damping);
    return full;
}

} // namespace optfuse
