/* SPDX-License-Identifier: BSD-3-Clause */
/* common.c: what a table says about all its tensors. */
#include <string.h>

#include "launch.h"
#include "rules/adam.h"
#include "rules/scaling.h"
#include "rules/sgd.h"

typedef struct rule {
    const char *name;
    size_t n_hyper;
    unsigned (*state_used)(const double *hyper);
} rule;

/* kernels.h has such a table too; this library has to stand alone. */
static const rule rules[] = {
    {"adam", ADAM_N_HYPER, adam_state_used},
    {"scaling", 0, scaling_state_used},
    {"sgd", SGD_N_HYPER, sgd_state_used},
};

of_cuda_status of_cuda_rule(const of_cuda_update *update, unsigned *used, of_cuda_common *common,
                            bool early) {
    memset(common, 0, sizeof *common);
    common->lr_at = update->lr_at;
    common->grad_scale_at = update->grad_scale_at;
    common->found_inf_at = update->found_inf_at;
    common->factor_at = update->factor_at;
    common->early = early;
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        if (strcmp(rules[i].name, update->rule) != 0)
            continue;
        memcpy(common->hyper, update->hyper, rules[i].n_hyper * sizeof(double));
        *used = rules[i].state_used(update->hyper);
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
