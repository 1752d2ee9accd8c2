// SPDX-License-Identifier: BSD-3-Clause
// collect.h: the part of collect() that concerns a GPU.
#pragma once

#include <ATen/core/Tensor.h>

#include "base/device.h"
#include "optfuse.h"

namespace optfuse {

struct Plan;
struct References;
struct Slot;

// Those of a rule, into the device, which may have to wait for it. hyper: as of of_gpu_update.
bool load_kernels(const CudaLibrary *library, const char *rule, const c10::Device &where,
                  of_dtype dtype, const double *hyper);
// mixed: as is_mixed() of plan/refuse.h says.
of_found prepare_gpu(Slot *slot, const c10::TensorImpl *p, of_dtype dtype, bool mixed);
// Whether the kernels that multiply gradients of this dtype are loaded now.
bool prepare_scaling(Plan *plan, const c10::Device &device, of_dtype dtype);
// The device, its stream and scalars; or why it can't be there.
of_found collect_gpu(Slot *slot, const c10::TensorImpl *p, of_inputs *in, References *refs);

} // namespace optfuse
