/* SPDX-License-Identifier: BSD-3-Clause */
/* powers.h: nvcc's powers, translated from its PTX. */
#ifndef OPTFUSE_TEST_PTX_POWERS_H
#define OPTFUSE_TEST_PTX_POWERS_H

float ptx_powf(float x, float exponent);
double ptx_pow(double x, double exponent);

#endif
