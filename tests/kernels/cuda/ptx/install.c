/* SPDX-License-Identifier: BSD-3-Clause */
/* install.c: linked to a program of the tests, it has translated PTX in the kernels' place. */
#include "batch.h"
#include "host_driver.h"
#include "machine.h"
#include "powers.h"

__attribute__((constructor)) static void install(void) {
    host.launching = ptx_launching;
    host.met = ptx_met;
    batch_powf = ptx_powf;
    batch_pow = ptx_pow;
}
