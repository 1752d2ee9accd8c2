/* SPDX-License-Identifier: BSD-3-Clause */
/* isa.c: the instruction sets: their names, and whether this CPU runs them and the build has
 * kernels for them. */
#include <string.h>

#include "isas.h"
#include "kernels.h"

#ifdef OF_HAS_AVX2
#include <cpuid.h>
#endif
#ifdef OF_HAS_SVE
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

static bool on_all(void) {
    return true;
}

static bool has_avx2(void) {
#ifdef OF_HAS_AVX2
    /* __builtin_cpu_supports also asks whether the system saves the registers; not every
     * compiler lets it answer for F16C, which needs no more than AVX. */
    unsigned a, b, c, d;
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
#else
    return false;
#endif
}

static bool has_avx512(void) {
#ifdef OF_HAS_AVX512
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
    return false;
#endif
}

static bool has_sve(void) {
#ifdef OF_HAS_SVE
    return getauxval(AT_HWCAP) & HWCAP_SVE;
#else
    return false;
#endif
}

static const struct {
    const char *name;
    bool (*runs)(void);
} isas[OF_ISA_COUNT] = {
    {"c", on_all},          {"baseline", on_all}, {"avx2", has_avx2},
    {"avx512", has_avx512}, {"sve", has_sve},
};

const char *of_isa_name(of_isa isa) {
    return isas[isa].name;
}

bool of_isa_parse(const char *name, of_isa *out) {
    for (int i = 0; i < OF_ISA_COUNT; i++) {
        if (strcmp(isas[i].name, name) == 0) {
            *out = (of_isa)i;
            return true;
        }
    }
    return false;
}

bool of_isa_runs(of_isa isa) {
    return isas[isa].runs();
}

of_isa of_isa_detect(void) {
    of_isa best = OF_ISA_COUNT - 1;
    while (!of_isa_runs(best))
        best--;
    return best;
}
