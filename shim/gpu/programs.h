// SPDX-License-Identifier: BSD-3-Clause
// programs.h: programs (kernels/program.h) over tensors on a GPU, of no plan.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "base/device.h"

namespace optfuse {

// Whether the kernels for this dtype are loaded into the device, so that no launch has to wait.
bool prepare_programs(const c10::Device &device, of_dtype dtype);
// Runs one on the device's current stream, over all tensors in one launch, in no order. of_program_check()
// has passed it.
void run_on_gpu(const of_program &program, const c10::Device &device, of_dtype dtype,
                const std::vector<of_gpu_entry> &entries);

} // namespace optfuse
