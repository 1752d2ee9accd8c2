/* SPDX-License-Identifier: BSD-3-Clause */
/* powers_check.c: nvcc's powers, translated, are within 2 units in the last place of the right
 * number, powf exact where that is a float32; and which corrections 1 - beta^step depend on what
 * rcp.approx gives.
 *
 *   powers_check [--steps N]
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "arrays.h"
#include "machine.h"
#include "powers.h"

_Thread_local host_index host_block_index, host_block_size, host_thread_index;
_Thread_local unsigned host_phase;

enum { ARGUMENTS = 1000000, MOST_SHOWN = 20 };

static int failures;

static void fail(const char *name, double x, double exponent, double have, long double want) {
    if (failures++ >= MOST_SHOWN)
        return;
    printf("FAIL %s of %a, %a: %a, not %La\n", name, x, exponent, have, want);
}

/* How far apart, in units in the last place of a number of so many digits. */
static long double units(double have, long double want, int digits, int least) {
    int exponent;
    const long double most = digits == 24 ? 0x1.ffffffp127L : 0x1.fffffffffffff8p1023L;
    if ((long double)have == want || (isnan(have) && isnan(want)) ||
        (isinf(have) && fabsl(want) >= most))
        return 0;
    frexpl(want, &exponent);
    const int unit = exponent - digits > least ? exponent - digits : least;
    return fabsl((long double)have - want) / ldexpl(1, unit);
}

/* Half of the bases are betas, half of the exponents are steps. */
static void pick(double *x, double *exponent, uint64_t *random) {
    const uint64_t kind = random_next(random);
    *x = kind & 1 ? 1 - ldexp(random_real(random), -(int)(kind >> 8 & 15))
                  : ldexp(random_real(random) + 0.5, (int)(kind >> 8 & 63) - 32);
    *exponent = kind & 2 ? (double)(kind >> 16 & 0x3ffff) : (random_real(random) - 0.5) * 60;
}

/* Whether 1 - beta^step is the same whatever rcp.approx gives, up to so many units from its value.
 */
static bool depends(float x, float exponent, int units) {
    float made[3];
    for (int i = 0; i < 3; i++) {
        ptx_now.nudge = (i - 1) * units;
        made[i] = 1.0f - ptx_powf(x, exponent);
    }
    ptx_now.nudge = 0;
    return memcmp(&made[0], &made[1], sizeof *made) || memcmp(&made[1], &made[2], sizeof *made);
}

static void check_nearness(void) {
    uint64_t random = 1;
    long double most = 0, most_wide = 0;
    int dependent = 0;
    for (int i = 0; i < ARGUMENTS; i++) {
        double x, y;
        pick(&x, &y, &random);
        const float fx = (float)x, fy = (float)y;
        const float narrow = ptx_powf(fx, fy);
        const double wide = ptx_pow(x, y);
        const long double want = powl(fx, fy), want_wide = powl(x, y);
        const long double far = units((double)narrow, want, 24, -149);
        const long double far_wide = units(wide, want_wide, 53, -1074);
        most = far > most ? far : most;
        dependent += depends(fx, fy, 1);
        most_wide = far_wide > most_wide ? far_wide : most_wide;
        if (far > 2)
            fail("powf", (double)fx, (double)fy, (double)narrow, want);
        if (far_wide > 2)
            fail("pow", x, y, wide, want_wide);
    }
    printf("of %d arguments powf is at most %.3Lf units from the right number, pow %.3Lf\n",
           ARGUMENTS, most, most_wide);
    printf("1 - powf depends on rcp.approx for %d of them\n", dependent);
}

/* Small numbers to small powers, and powers of 2. powf has them exactly; pow now and then has a
 * neighbour, which 2 units allow. */
static void check_exact(void) {
    int many = 0, inexact = 0;
    for (int x = -64; x <= 64; x++)
        for (int y = 0; y <= 24; y++) {
            const long double want = powl(x, y);
            const bool narrow = fabsl(want) <= 0x1p24L, wide = fabsl(want) <= 0x1p53L;
            many += wide;
            inexact += wide && ptx_pow(x, y) != (double)want;
            if (narrow && ptx_powf((float)x, (float)y) != (float)want)
                fail("powf", x, y, (double)ptx_powf((float)x, (float)y), want);
        }
    for (int y = -149; y < 128; y++)
        if (ptx_powf(2, (float)y) != ldexpf(1, y))
            fail("powf", 2, y, (double)ptx_powf(2, (float)y), ldexpl(1, y));
    printf("powf is exact where its result is; pow has a neighbour for %d of %d whole numbers\n",
           inexact, many);
}

static void check_edges(void) {
    static const double edges[] = {0.0, -0.0, 1.0, -1.0, INFINITY, -INFINITY, NAN, 2.0, -3.0};
    for (int i = 0; i < 81; i++) {
        const double x = edges[i / 9], y = edges[i % 9], want = pow(x, y);
        if (fabs(x) == 3.0 && y < 0)
            continue; /* has to be rounded */
        if (units((double)ptx_powf((float)x, (float)y), want, 24, -149) > 0)
            fail("powf", x, y, (double)ptx_powf((float)x, (float)y), want);
        if (units(ptx_pow(x, y), want, 53, -1074) > 2)
            fail("pow", x, y, ptx_pow(x, y), want);
    }
}

static bool depends_wide(double beta, double step) {
    double made[3];
    for (int i = 0; i < 3; i++) {
        ptx_now.nudge = i - 1;
        made[i] = 1.0 - ptx_pow(beta, step);
    }
    ptx_now.nudge = 0;
    return memcmp(&made[0], &made[1], sizeof *made) || memcmp(&made[1], &made[2], sizeof *made);
}

static void report_steps(int steps) {
    static const double betas[] = {0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999};
    int far = 0;
    for (size_t i = 0; i < sizeof betas / sizeof *betas; i++) {
        int narrow = 0, wide = 0;
        for (int step = 1; step <= steps; step++) {
            const bool some = depends((float)betas[i], (float)step, 1);
            if (some && narrow < MOST_SHOWN)
                printf("  beta %g, step %d depends on rcp.approx\n", betas[i], step);
            narrow += some;
            wide += depends_wide(betas[i], step);
            far += depends((float)betas[i], (float)step, 1 << 14);
        }
        printf("beta %g: of %d steps %d depend on rcp.approx in float32, %d in float64\n", betas[i],
               steps, narrow, wide);
    }
    if (!far) {
        printf("FAIL no correction depends on an approximation that is far off\n");
        failures++;
    }
}

/* ASGD's eta at its default options, lambd * lr = 1e-6 and alpha = 0.75. */
static void report_asgd(int steps) {
    int dependent = 0;
    for (int step = 1; step <= steps; step++) {
        float eta[3];
        for (int i = 0; i < 3; i++) {
            ptx_now.nudge = i - 1;
            eta[i] = 1.0f / ptx_powf((float)step * 1e-6f + 1.0f, 0.75f) * 0.01f;
        }
        const bool some = memcmp(&eta[0], &eta[1], sizeof *eta) != 0 ||
                          memcmp(&eta[1], &eta[2], sizeof *eta) != 0;
        if (some && dependent < MOST_SHOWN)
            printf("  ASGD's eta after step %d depends on rcp.approx\n", step);
        dependent += some;
    }
    ptx_now.nudge = 0;
    printf("ASGD's eta: of %d steps %d depend on rcp.approx\n", steps, dependent);
}

int main(int argc, char **argv) {
    check_nearness();
    check_exact();
    check_edges();
    const int steps = argc == 3 && strcmp(argv[1], "--steps") == 0 ? atoi(argv[2]) : 2000;
    report_steps(steps);
    report_asgd(steps);
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
