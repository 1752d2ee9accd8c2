// SPDX-License-Identifier: BSD-3-Clause
// powers.cu: CUDA's powers alone. One type a compilation, which has the flags of the kernels that
// compute powers in this type.
#ifdef OF_DTYPE_FLOAT64
extern "C" __global__ void ptx_power_float64(double *out, double x, double exponent) {
    *out = ::pow(x, exponent);
}
#else
extern "C" __global__ void ptx_power_float32(float *out, float x, float exponent) {
    *out = ::powf(x, exponent);
}
#endif
