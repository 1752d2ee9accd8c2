// SPDX-License-Identifier: BSD-3-Clause
// plain_mode.h: how the shim calls PyTorch's operators.
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace optfuse {

// Our own tensor operations must not be seen by the user's modes: no autograd,
// no Python dispatch, no functorch, no autocast, no inference mode.
struct PlainMode {
    c10::InferenceMode normal{false};
    c10::AutoGradMode no_grad{false};
    c10::impl::ExcludeDispatchKeyGuard no_modes{
        c10::python_ks | c10::functorch_transforms_ks | c10::autocast_dispatch_keyset |
        c10::autograd_dispatch_keyset_with_ADInplaceOrView};
};

} // namespace optfuse
