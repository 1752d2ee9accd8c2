// SPDX-License-Identifier: BSD-3-Clause
// by_host.h: updates by operators, or by a class's own step().
#pragma once

#include <ATen/core/Tensor.h>

#include "optfuse.h"

namespace optfuse {

struct References;
struct Slot;

of_found fill_in_by_host(Slot *slot, c10::TensorImpl *p, const at::Tensor &grad, of_inputs *in,
                         References *refs);
extern const of_external_host external_host;

} // namespace optfuse
