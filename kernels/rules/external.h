/* SPDX-License-Identifier: BSD-3-Clause */
/* external.h: the options of rules that have no kernels, in the order in which the
 * host's apply() gets them. All are NaN where one of them is no plain number: the
 * update is then the class's own code. The state is the host's affair. */
#ifndef OPTFUSE_RULES_EXTERNAL_H
#define OPTFUSE_RULES_EXTERNAL_H

#include "lists.h"

/* eps1: NaN for that of the parameter's dtype. */
#define ADAFACTOR_STATE(X)
#define ADAFACTOR_OPTIONS(X)                                                                       \
    X(adafactor, lr) X(adafactor, beta2_decay) X(adafactor, eps1) X(adafactor, eps2)               \
    X(adafactor, d) X(adafactor, weight_decay) X(adafactor, foreach) X(adafactor, maximize)
#define ADAFACTOR_COUNTERS(X)
OF_ENUMERATE(ADAFACTOR);

/* adjust_lr: an of_adjust_lr. */
#define MUON_STATE(X)
#define MUON_OPTIONS(X)                                                                            \
    X(muon, lr) X(muon, weight_decay) X(muon, momentum) X(muon, nesterov) X(muon, a) X(muon, b)    \
    X(muon, c) X(muon, eps) X(muon, ns_steps) X(muon, adjust_lr)
#define MUON_COUNTERS(X)
OF_ENUMERATE(MUON);

typedef enum of_adjust_lr { OF_ADJUST_ORIGINAL, OF_ADJUST_MATCH_RMS } of_adjust_lr;

/* Any optimizer whose own code is run on one parameter. */
#define OWN_STATE(X)
#define OWN_OPTIONS(X)
#define OWN_COUNTERS(X)
OF_ENUMERATE(OWN);

#endif
