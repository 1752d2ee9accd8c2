// SPDX-License-Identifier: BSD-3-Clause
#include "gpu/programs.h"

#include <array>
#include <string>

#include "base/error.h"
#include "gpu/collect.h"

namespace optfuse {
namespace {

constexpr const char *kRule = "programs";
const double kNoOptions[OF_MAX_HYPER] = {};

} // namespace

bool prepare_programs(const c10::Device &device, of_dtype dtype) {
    static std::array<std::atomic<bool>, 64 * OF_DTYPE_COUNT> loaded;
    const size_t place = static_cast<size_t>(device.index()) * OF_DTYPE_COUNT + dtype;
    if (place >= loaded.size())
        return false;
    if (loaded[place].load(std::memory_order_relaxed))
        return true;
    const CudaLibrary *library = cuda_library();
    if (library == nullptr || !load_kernels(library, kRule, device, dtype, kNoOptions))
        return false;
    loaded[place].store(true, std::memory_order_relaxed);
    return true;
}

void run_on_gpu(const of_program &program, const c10::Device &device, of_dtype dtype,
                const std::vector<of_gpu_entry> &entries) {
    of_gpu_update update = {};
    update.rule = kRule;
    update.dtype = dtype;
    update.hyper = kNoOptions;
    update.program = &program;
    const of_stream stream = current_stream(device.index());
    if (!gpu_functions.launch(nullptr, &stream, &update, entries.data(), entries.size()))
        fail(std::string("optfuse: a program on a GPU: ") + of_error_message());
}

} // namespace optfuse
