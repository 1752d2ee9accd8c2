/* SPDX-License-Identifier: BSD-3-Clause */
#include "powers.h"

#include "machine.h"

void ptx_power_float32(const void *arguments);
void ptx_power_float64(const void *arguments);

float ptx_powf(float x, float exponent) {
    float out;
    const struct {
        float *out;
        float x, exponent;
    } arguments = {&out, x, exponent};
    ptx_alone("powf", &arguments, sizeof arguments, &out, sizeof out);
    ptx_power_float32(&arguments);
    return out;
}

double ptx_pow(double x, double exponent) {
    double out;
    const struct {
        double *out;
        double x, exponent;
    } arguments = {&out, x, exponent};
    ptx_alone("pow", &arguments, sizeof arguments, &out, sizeof out);
    ptx_power_float64(&arguments);
    return out;
}
