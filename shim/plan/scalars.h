// SPDX-License-Identifier: BSD-3-Clause
// scalars.h: 0-dim tensors on a GPU that updates read there.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "optfuse.h"

namespace optfuse {

struct References;

// Scalars of this step that live on a GPU: learning rates, the loss scale and
// whether a gradient overflowed; and the factor of the clipping under way. An update
// that runs later reads a copy, which nobody rewrites.
class DeviceScalars {
  public:
    // lr: one for each group, undefined where it is a number.
    void set(std::vector<at::Tensor> lr, at::Tensor grad_scale, at::Tensor found_inf);
    bool scale_gradients() const { return scales; }
    // Whether updates write the gradients that they have divided.
    bool divide_gradients() const { return divides; }
    // Fills in the addresses and the references that keep them valid.
    void give(size_t group, of_inputs *in, References *refs);
    // A 0-dim tensor that nobody writes to any more, or an undefined one.
    void set_factor(at::Tensor by);
    // Whether it is of this dtype. PyTorch's operators differ in how they round one
    // of another dtype, and are left to do so.
    bool has_factor(at::ScalarType dtype);
    void give_factor(of_inputs *in, References *refs);

  private:
    struct Copy {
        const c10::TensorImpl *of;
        of_stream stream; // on which it was made
        at::Tensor copy;
    };
    const float *copy_of(const at::Tensor &scalar, const of_stream &stream, at::Tensor *keep);
    // Whether set() has found some, for who needs no tensor.
    std::atomic<bool> any{false}, scales{false}, divides{false};
    std::mutex lock; // guards the rest: two devices' hooks may come at once, and tell it anew
    std::vector<at::Tensor> lr;
    at::Tensor grad_scale, found_inf, factor;
    std::vector<Copy> copies;
    // The factor in the type of the computation, on the devices that have asked for it.
    std::vector<std::pair<of_stream, at::Tensor>> factors;
};

} // namespace optfuse
