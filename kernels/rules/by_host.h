/* SPDX-License-Identifier: BSD-3-Clause */
/* by_host.h: the options of rules that have no kernels, in the order in which the
 * host's apply() gets them. All are NaN where one of them is no plain number: the
 * update is then the class's own code. */
#ifndef OPTFUSE_RULES_BY_HOST_H
#define OPTFUSE_RULES_BY_HOST_H

/* eps1: NaN for that of the parameter's dtype. */
enum {
    ADAFACTOR_LR,
    ADAFACTOR_BETA2_DECAY,
    ADAFACTOR_EPS1,
    ADAFACTOR_EPS2,
    ADAFACTOR_D,
    ADAFACTOR_WEIGHT_DECAY,
    ADAFACTOR_FOREACH,
    ADAFACTOR_MAXIMIZE,
    ADAFACTOR_N_HYPER
};

enum {
    MUON_LR,
    MUON_WEIGHT_DECAY,
    MUON_MOMENTUM,
    MUON_NESTEROV,
    MUON_A,
    MUON_B,
    MUON_C,
    MUON_EPS,
    MUON_NS_STEPS,
    MUON_ADJUST_LR, /* of_adjust_lr */
    MUON_N_HYPER
};

typedef enum of_adjust_lr { OF_ADJUST_ORIGINAL, OF_ADJUST_MATCH_RMS } of_adjust_lr;

#endif
