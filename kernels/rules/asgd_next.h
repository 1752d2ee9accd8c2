/* SPDX-License-Identifier: BSD-3-Clause */
/* asgd_next.h: what ASGD's eta and mu become after an update on a GPU, as PyTorch's
 * multi-tensor implementation computes them: eta by operators on the step counter, a
 * float32 tensor on the device; mu from its value, in double. */
#ifndef OPTFUSE_RULES_ASGD_NEXT_H
#define OPTFUSE_RULES_ASGD_NEXT_H

#include <math.h>

#include "real.h"

typedef struct asgd_schedule {
    double lr, growth, alpha, t0; /* growth: lambd * lr */
} asgd_schedule;

/* pow(x, exponent) of a float32 tensor and a number, which has code of its own for some
 * exponents. (Also for negative ones: these kernels are not launched with such an alpha,
 * _trials/stock_trial.py.) */
OF_RULE_FN float asgd_power(float x, double exponent) {
    const float single = (float)exponent;
    if (exponent == 0.0)
        return 1.0f;
    if (exponent == 0.5)
        return sqrtf(x);
    if (exponent == 1.0)
        return x;
    if (single == 2.0f)
        return x * x;
    if (single == 3.0f)
        return x * x * x;
    return powf(x, single);
}

/* lr / (1 + lambd * lr * step) ** alpha; Python divides a number by a tensor by its
 * reciprocal. */
OF_RULE_FN float asgd_next_eta(const asgd_schedule *of, float step) {
    const float growth = step * (float)of->growth + 1.0f;
    return 1.0f / asgd_power(growth, of->alpha) * (float)of->lr;
}

OF_RULE_FN float asgd_next_mu(const asgd_schedule *of, float step) {
    const double late = (double)step - of->t0;
    return (float)(1.0 / (late > 1.0 ? late : 1.0));
}

#endif
