// SPDX-License-Identifier: BSD-3-Clause
// host.h: the core's host over libtorch, by functions of this folder. doors/shim.cpp adds what folders
// above have for it.
#pragma once

#include <ATen/core/Tensor.h>

#include "optfuse.h"

namespace optfuse {

struct Plan;
struct References;
struct Slot;

of_host make_host(Plan *plan);
// The CPU reference that this build of ATen computes with.
void fill_reference(of_plan_options *options);

// host.cpp
void settle(void *ctx, void *references, bool was_deferred);

// usual.cpp
of_found collect(void *ctx, void *tensor, of_inputs *in);

// collect.cpp
// Launches another optimizer's update of the same memory, before the memory is judged and used.
// Behind most marks no update is pending.
[[gnu::noinline]] void launch_others(const c10::TensorImpl *impl,
                                     decltype(&of_access) launch = of_access);

// Does all of collect()'s work, for whatever tensors; refuses those that can't be updated. Nothing
// of what is in *in counts. Throws where something that is pending on the tensors fails.
of_found collect_special(Plan *plan, Slot *slot, const at::Tensor &grad, of_inputs *in);

// by_host.cpp: updates by operators, or by a class's own step().
of_found fill_in_by_host(Slot *slot, c10::TensorImpl *p, const at::Tensor &grad, of_inputs *in,
                         References *refs);
extern const of_external_host external_host;

// prefetch.cpp
void prefetch(void *ctx, void *const *tensors, size_t n);

// square_roots.cpp: n values of float32, or of float64, with the bits of PyTorch's operator.
void square_roots_of_floats(void *values, size_t n);
void square_roots_of_doubles(void *values, size_t n);

} // namespace optfuse
