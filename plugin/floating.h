/* SPDX-License-Identifier: BSD-3-Clause */
/* floating.h: how the calling thread computes with floating-point numbers: whether it takes
 * denormals for zeros (torch.set_flush_denormal()), and how it rounds. Each thread has a
 * setting of its own; a new one inherits that of the thread that starts it. */
#ifndef OPTFUSE_FLOATING_H
#define OPTFUSE_FLOATING_H

#if defined(__SSE__)
#include <xmmintrin.h>

enum { OF_FLOATING_BITS = 0x8000 | 0x6000 | 0x0040 }; /* MXCSR: flush, rounding, denormals */

static inline unsigned of_floating_now(void) {
    return _mm_getcsr() & OF_FLOATING_BITS;
}

static inline void of_floating_set(unsigned mode) {
    _mm_setcsr((_mm_getcsr() & ~(unsigned)OF_FLOATING_BITS) | mode);
}

#else

static inline unsigned of_floating_now(void) {
    return 0;
}

static inline void of_floating_set(unsigned mode) {
    (void)mode;
}

#endif

#endif
