// SPDX-License-Identifier: BSD-3-Clause
// apply.h: updates of rules without kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include "optfuse.h"

namespace optfuse {

struct References;
struct Slot;

of_found fill_in_own(Slot *slot, c10::TensorImpl *p, const at::Tensor &grad, of_inputs *in,
                     References *refs);
extern const of_external_host external_host;

} // namespace optfuse
