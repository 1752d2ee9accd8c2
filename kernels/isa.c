/* SPDX-License-Identifier: BSD-3-Clause */
/* isa.c: names of the instruction sets, and the best that this CPU runs and the build has. */
#include <string.h>

#include "isas.h"
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

static const char *const names[OF_ISA_COUNT] = {"c", "baseline", "avx2", "avx512"};

const char *of_isa_name(of_isa isa) {
    return names[isa];
}

bool of_isa_parse(const char *name, of_isa *out) {
    for (int i = 0; i < OF_ISA_COUNT; i++) {
        if (strcmp(names[i], name) == 0) {
            *out = (of_isa)i;
            return true;
        }
    }
    return false;
}

#if defined(__x86_64__)

/* __builtin_cpu_supports also asks whether the system saves the registers;
 * not every compiler lets it answer for F16C, which needs no more than AVX. */
static bool has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static of_isa of_this_cpu(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c())
        return OF_ISA_BASELINE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return OF_ISA_AVX2;
    return OF_ISA_AVX512;
}

#else

static of_isa of_this_cpu(void) {
    return OF_ISA_BASELINE;
}

#endif

of_isa of_isa_detect(void) {
    of_isa widest = OF_ISA_BASELINE;
    OF_AVX2(widest = OF_ISA_AVX2;)
    OF_AVX512(widest = OF_ISA_AVX512;)
    const of_isa found = of_this_cpu();
    return found < widest ? found : widest;
}
