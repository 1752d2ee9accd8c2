/* SPDX-License-Identifier: BSD-3-Clause */
/* install.c: linked to a program of the tests, it has translated PTX in the kernels' place. */
#include "batch.h"
#include "machine.h"
#include "powers.h"

__attribute__((constructor)) static void install(void) {
    ptx_install();
    batch_powf = ptx_powf;
    batch_pow = ptx_pow;
}
