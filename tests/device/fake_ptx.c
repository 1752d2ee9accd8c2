/* SPDX-License-Identifier: BSD-3-Clause */
/* fake_ptx.c: linked to the library of the kernels, it has translated PTX in their place, and
 * hands nvcc's powers to the device. */
#include "cuda/host_driver.h"
#include "ptx/machine.h"
#include "ptx/powers.h"

#define VISIBLE __attribute__((visibility("default")))

VISIBLE float fake_optfuse_powf(float x, float exponent);
VISIBLE double fake_optfuse_pow(double x, double exponent);

float fake_optfuse_powf(float x, float exponent) {
    return ptx_powf(x, exponent);
}

double fake_optfuse_pow(double x, double exponent) {
    return ptx_pow(x, exponent);
}

__attribute__((constructor)) static void install(void) {
    host.launching = ptx_launching;
    host.met = ptx_met;
}
