/* SPDX-License-Identifier: BSD-3-Clause */
/* install.c: linked to a program of the tests, it has translated PTX in the kernels' place.
 * OPTFUSE_PTX_NUDGE, -1 or 1, makes approximate instructions give the neighbours of their values:
 * a kernel whose bits do not change depends on none of them. What is expected keeps the values. */
#include <stdlib.h>

#include "batch.h"
#include "host_driver.h"
#include "machine.h"
#include "powers.h"

static int nudge;

static float expected_powf(float x, float exponent) {
    ptx_now.nudge = 0;
    return ptx_powf(x, exponent);
}

static double expected_pow(double x, double exponent) {
    ptx_now.nudge = 0;
    return ptx_pow(x, exponent);
}

static void launching(const char *kernel, const void *table, size_t bytes) {
    ptx_launching(kernel, table, bytes);
    ptx_now.nudge = nudge;
}

__attribute__((constructor)) static void install(void) {
    const char *asked = getenv("OPTFUSE_PTX_NUDGE");
    nudge = asked ? atoi(asked) : 0;
    host.launching = launching;
    host.met = ptx_met;
    batch_powf = expected_powf;
    batch_pow = expected_pow;
}
