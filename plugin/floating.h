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

#elif defined(__aarch64__)
#include <stdint.h>

/* FPCR: flush, rounding, flush of 16-bit numbers. */
enum { OF_FLOATING_BITS = 1 << 24 | 3 << 22 | 1 << 19 };

static inline uint64_t of_floating_register(void) {
    uint64_t fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr)::"memory");
    return fpcr;
}

static inline unsigned of_floating_now(void) {
    return (unsigned)of_floating_register() & OF_FLOATING_BITS;
}

static inline void of_floating_set(unsigned mode) {
    const uint64_t others = of_floating_register() & ~(uint64_t)OF_FLOATING_BITS;
    __asm__ volatile("msr fpcr, %0" ::"r"(others | mode) : "memory");
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
