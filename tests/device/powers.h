// SPDX-License-Identifier: BSD-3-Clause
// powers.h: the powers that the device's kernels compute with: the C library's, or where
// translated PTX runs nvcc's own (set_powers() of fakecuda.py).
#pragma once

namespace fake {

float power(float x, float exponent);
double power(double x, double exponent);

} // namespace fake
