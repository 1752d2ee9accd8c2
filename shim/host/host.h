// SPDX-License-Identifier: BSD-3-Clause
// host.h: the core's host over libtorch. host.cpp fills its table with functions of these
// files, of host/by_host.h and of clipping/pending.h.
#pragma once

#include <ATen/core/Tensor.h>

#include "optfuse.h"

namespace optfuse {

struct Plan;

of_host make_host(Plan *plan);
// The CPU reference that this build of ATen computes with.
void fill_reference(of_plan_options *options);

// usual.cpp
of_found collect(void *ctx, void *tensor, of_inputs *in);

// collect.cpp
// Launches another optimizer's update of the same memory, before the memory is judged and used.
// Behind most marks no update is pending.
[[gnu::noinline]] void launch_others(const c10::TensorImpl *impl,
                                     decltype(&of_access) launch = of_access);

// prefetch.cpp
void prefetch(void *ctx, void *const *tensors, size_t n);

} // namespace optfuse
