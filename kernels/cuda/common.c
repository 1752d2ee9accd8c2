/* SPDX-License-Identifier: BSD-3-Clause */
/* common.c: what a table says about all its tensors. */
#include <string.h>

#include "launch.h"
#include "rules/adadelta.h"
#include "rules/adagrad_foreach.h"
#include "rules/adam.h"
#include "rules/adamax.h"
#include "rules/asgd_foreach.h"
#include "rules/lion.h"
#include "rules/nadam_foreach.h"
#include "rules/radam_foreach.h"
#include "rules/rmsprop.h"
#include "rules/rprop.h"
#include "rules/scaling.h"
#include "rules/sgd.h"

typedef struct rule {
    const char *name;
    size_t bytes; /* of its options, or of its prepared scalars */
    unsigned (*state_used)(const double *hyper);
    bool prepared;
    uint8_t numbers; /* that each tensor has on the device */
} rule;

/* All prepared scalars begin in one way. */
static unsigned variant_of(const double *prepared) {
    chain_scalars chain;
    memcpy(&chain, prepared, sizeof chain);
    return chain.variant;
}

#define OF_PREPARED(X)                                                                             \
    X(rmsprop, rmsprop, 0)                                                                         \
    X(adadelta, adadelta, 0)                                                                       \
    X(nadam, nadam_foreach, 0)                                                                     \
    X(radam, radam_foreach, 0)                                                                     \
    X(adamax, adamax, 0)                                                                           \
    X(rprop, rprop, 0)                                                                             \
    X(adagrad, adagrad_foreach, 0)                                                                 \
    X(asgd, asgd_foreach, ASGD_N_COUNTERS)                                                         \
    X(lion, lion, 0)
#define OF_USED(rule, form, numbers)                                                               \
    static unsigned rule##_used(const double *prepared) {                                          \
        return form##_variant_state(variant_of(prepared));                                         \
    }
#define OF_PREPARED_ROW(rule, form, numbers)                                                       \
    {#rule, sizeof(form##_scalars), rule##_used, true, numbers},

OF_PREPARED(OF_USED)

/* kernels.h has such a table too; this library has to stand alone. */
static const rule rules[] = {{"adam", ADAM_N_HYPER * sizeof(double), adam_state_used, false, 0},
                             {"scaling", 0, scaling_state_used, false, 0},
                             {"sgd", SGD_N_HYPER * sizeof(double), sgd_state_used, false, 0},
                             OF_PREPARED(OF_PREPARED_ROW)};

of_cuda_status of_cuda_rule(const of_cuda_update *update, unsigned *used, of_cuda_common *common,
                            bool early) {
    memset(common, 0, sizeof *common);
    common->lr_at = update->lr_at;
    common->grad_scale_at = update->grad_scale_at;
    common->found_inf_at = update->found_inf_at;
    common->factor_at = update->factor_at;
    common->early = early;
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        const rule *known = &rules[i];
        if (strcmp(known->name, update->rule) != 0)
            continue;
        if (known->prepared && (update->lr_at || update->grad_scale_at || update->found_inf_at))
            return of_cuda_fail(OF_CUDA_INVALID, "%s takes no scalars on the device", known->name);
        memcpy(common->hyper, update->hyper, known->bytes);
        common->numbers = known->numbers;
        *used = known->state_used(update->hyper);
        return OF_CUDA_OK;
    }
    return of_cuda_fail(OF_CUDA_UNSUPPORTED, "no CUDA kernels for the rule %s", update->rule);
}

size_t of_cuda_dtype_size(of_dtype dtype) {
    static const size_t sizes[OF_DTYPE_COUNT] = {4, 8, 2, 2};
    return sizes[dtype];
}

const char *of_cuda_dtype_name(of_dtype dtype) {
    static const char *const names[OF_DTYPE_COUNT] = {"float32", "float64", "bfloat16", "float16"};
    return names[dtype];
}
