// SPDX-License-Identifier: BSD-3-Clause
// refuse.h: what can be updated, and what is said of the rest.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "optfuse.h"

namespace optfuse {

struct Slot;

// Whether there is a kernel for it.
inline bool dtype_of(const c10::TensorImpl *impl, of_dtype *out) {
    switch (impl->dtype().toScalarType()) {
    case c10::ScalarType::Float:
        *out = OF_FLOAT32;
        return true;
    case c10::ScalarType::Double:
        *out = OF_FLOAT64;
        return true;
    case c10::ScalarType::BFloat16:
        *out = OF_BFLOAT16;
        return true;
    case c10::ScalarType::Half:
        *out = OF_FLOAT16;
        return true;
    default:
        return false;
    }
}
// And back.
inline c10::ScalarType type_of(of_dtype dtype) {
    constexpr c10::ScalarType kTypes[] = {c10::ScalarType::Float, c10::ScalarType::Double,
                                          c10::ScalarType::BFloat16, c10::ScalarType::Half};
    static_assert(OF_FLOAT32 == 0 && OF_FLOAT64 == 1 && OF_BFLOAT16 == 2 && OF_FLOAT16 == 3);
    return kTypes[dtype];
}
// OF_FOUND_ERROR and the message, or OF_FOUND_INPUTS
of_found refuse(const Slot *slot, const char *which, const char *what, const std::string &detail);
// In-place updates of inference tensors are allowed in inference mode only.
bool is_frozen_inference(const c10::TensorImpl *impl);
of_found refuse_frozen(const Slot *slot, const char *which);
of_found check_param(const Slot *slot, const c10::TensorImpl *p, of_dtype *dtype);
// Dtype and device in one number: Slot::tried.
int64_t place_of(const c10::TensorImpl *p, of_dtype dtype);
bool is_tried(const Slot *slot, const c10::TensorImpl *p, of_dtype dtype);
of_found check_tried(const Slot *slot, const c10::TensorImpl *p, of_dtype dtype);
of_found check_gradient(const Slot *slot, const c10::TensorImpl *p, const c10::TensorImpl *g,
                        bool is_written);
// Whether all state in use is bfloat16, beside a float32 parameter on a GPU, and may be.
bool is_mixed(const Slot *slot, const c10::TensorImpl *p, unsigned used);
// Whether all state in use is float32, beside a parameter of 16 bits, of a rule that rounds.
bool is_wide(const Slot *slot, const c10::TensorImpl *p, unsigned used);
// i: of the rule's state tensors, or of the program's. *in: mixed and wide are known.
of_found check_state(const Slot *slot, const c10::TensorImpl *p, size_t i, const of_inputs *in);
// Whether they have memory in common. Those with holes that lie in each other's are taken to, too.
bool meet(const c10::TensorImpl *a, const c10::TensorImpl *b);
// Whether state tensors of a kernel's rule have one storage. (A program may read one twice.)
bool states_share(const Slot *slot, unsigned used);
// A kernel reads an element of each tensor and then writes it; PyTorch's operators, one after the
// other, see what the one before has written to shared memory.
of_found check_apart(const Slot *slot, const c10::TensorImpl *p, const c10::TensorImpl *g,
                     unsigned used);
// All of them must lie in memory as the parameter, without holes.
of_found check_strides(const Slot *slot, const c10::TensorImpl *p, const c10::TensorImpl *g,
                       unsigned used);
of_found check_step(const Slot *slot, const c10::TensorImpl *p);
bool step_is_on_gpu(const Slot *slot);
// The rule's counters have to be there, too.
bool counts_on_gpu(const Slot *slot);
// Elements are not what memory holds: negated or zero by a flag, and resolved
// only by PyTorch's own operators.
bool is_lazy(const c10::TensorImpl *impl);

} // namespace optfuse
