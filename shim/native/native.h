// SPDX-License-Identifier: BSD-3-Clause
// native.h: updates of backward mode that need no Python: the class's own step() on one parameter of
// the CPU, written with PyTorch's operators in its order, so that it has its bits.
#pragma once

#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace optfuse {

struct NativeInputs {
    const at::Tensor &param, &grad; // of equal dtype, shape and device
    const std::vector<at::Tensor> &state; // in the class's order; none: it is not as usual
    const double *hyper;                  // those below
};

// Options, all NaN where one is no plain number. eps1: NaN for that of the parameter's dtype.
enum {
    adafactor_lr, adafactor_beta2_decay, adafactor_eps1, adafactor_eps2, adafactor_d,
    adafactor_weight_decay, adafactor_foreach, adafactor_maximize
};
enum {
    muon_lr, muon_weight_decay, muon_momentum, muon_nesterov, muon_a, muon_b, muon_c, muon_eps,
    muon_ns_steps, muon_matches_rms
};

// False: nothing has changed, and the class's own code has to update. The state is
// not made yet, or something is not as it usually is.
using NativeUpdate = bool(const NativeInputs &in);
NativeUpdate adafactor, muon;

NativeUpdate *native_update(const std::string &name); // nullptr if there is none

// The state is a tensor like those that the class makes beside this gradient.
bool is_usual_state(const at::Tensor &state, const at::Tensor &grad);

// A number as Python hands it to an operator that takes a tensor. mul_(Scalar) of C++
// multiplies the other way round, which rounds the number to 16 bits first.
inline at::Tensor operand(const c10::Scalar &number) {
    return at::native::wrapped_scalar_tensor(number);
}

// min() and max() of Python, of floats: the first one if they don't compare.
inline double least(double a, double b) { return b < a ? b : a; }
inline double greatest(double a, double b) { return b > a ? b : a; }

} // namespace optfuse
