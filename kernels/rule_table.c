/* SPDX-License-Identifier: BSD-3-Clause */
/* rule_table.c: the rules as const rows. */
#include <string.h>

#include "kernels.h"
#include "rules/adadelta.h"
#include "rules/adagrad_foreach.h"
#include "rules/adam.h"
#include "rules/adamax.h"
#include "rules/asgd_foreach.h"
#include "rules/by_host.h"
#include "rules/lion.h"
#include "rules/nadam_foreach.h"
#include "rules/radam_foreach.h"
#include "rules/rmsprop.h"
#include "rules/rprop.h"
#include "rules/sgd.h"

static const char *const adam_state[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
static const char *const adam_hyper[] = {"lr",           "beta1",   "beta2",    "eps",
                                         "weight_decay", "amsgrad", "maximize", "decoupled"};
static const char *const sgd_state[] = {"momentum_buffer"};
static const char *const sgd_hyper[] = {"lr",           "momentum", "dampening",
                                        "weight_decay", "nesterov", "maximize"};
static const char *const rmsprop_state[] = {"momentum_buffer", "square_avg", "grad_avg"};
static const char *const rmsprop_hyper[] = {"lr",       "alpha",    "eps",     "weight_decay",
                                            "momentum", "centered", "maximize"};
static const char *const adadelta_state[] = {"square_avg", "acc_delta"};
static const char *const adadelta_hyper[] = {"lr", "rho", "eps", "weight_decay", "maximize"};
static const char *const nadam_state[] = {"exp_avg", "exp_avg_sq"};
static const char *const nadam_hyper[] = {
    "lr",      "beta1", "beta2", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay",
    "maximize"};
static const char *const nadam_counters[] = {"mu_product"};
static const char *const radam_state[] = {"exp_avg", "exp_avg_sq"};
static const char *const radam_hyper[] = {
    "lr", "beta1", "beta2", "eps", "weight_decay", "decoupled_weight_decay", "maximize"};
static const char *const adamax_state[] = {"exp_avg", "exp_inf"};
static const char *const adamax_hyper[] = {"lr",  "beta1",        "beta2",
                                           "eps", "weight_decay", "maximize"};
static const char *const rprop_state[] = {"prev", "step_size"};
static const char *const rprop_hyper[] = {"etaminus", "etaplus", "step_size_min", "step_size_max",
                                          "maximize"};
static const char *const asgd_state[] = {"ax"};
static const char *const asgd_hyper[] = {"lr", "lambd", "alpha", "t0", "weight_decay", "maximize"};
static const char *const asgd_counters[] = {"eta", "mu"};
static const char *const adagrad_state[] = {"sum"};
static const char *const adagrad_hyper[] = {"lr", "lr_decay", "weight_decay", "eps", "maximize"};
static const char *const lion_state[] = {"exp_avg"};
static const char *const lion_hyper[] = {"lr", "beta1", "beta2", "weight_decay", "maximize"};

static const char *const adafactor_hyper[] = {"lr", "beta2_decay",  "eps1",    "eps2",
                                              "d",  "weight_decay", "foreach", "maximize"};
static const char *const muon_hyper[] = {"lr", "weight_decay", "momentum", "nesterov", "a", "b",
                                         "c",  "eps",          "ns_steps", "adjust_lr"};

#define OF_LENGTH(array) (sizeof(array) / sizeof *(array))
#define OF_FITS(rule, RULE)                                                                        \
    _Static_assert(OF_LENGTH(rule##_state) == RULE##_N_STATE, "names of " #rule "'s state");       \
    _Static_assert(OF_LENGTH(rule##_hyper) == RULE##_N_HYPER, "names of " #rule "'s options");     \
    _Static_assert((int)RULE##_N_HYPER <= (int)OF_MAX_HYPER, "options of " #rule);                 \
    _Static_assert(sizeof(rule##_scalars) <= OF_MAX_SCALARS, "scalars of " #rule)

OF_FITS(adam, ADAM);
OF_FITS(sgd, SGD);
OF_FITS(rmsprop, RMSPROP);
OF_FITS(adadelta, ADADELTA);
OF_FITS(nadam, NADAM);
_Static_assert(OF_LENGTH(nadam_counters) == NADAM_N_COUNTERS, "names of nadam's counters");
OF_FITS(radam, RADAM);
OF_FITS(adamax, ADAMAX);
OF_FITS(rprop, RPROP);
OF_FITS(asgd, ASGD);
_Static_assert(OF_LENGTH(asgd_counters) == ASGD_N_COUNTERS, "names of asgd's counters");
OF_FITS(adagrad, ADAGRAD);
OF_FITS(lion, LION);

/* Where a kernel on a GPU otherwise has the options. */
#define OF_FITS_GPU(form)                                                                          \
    _Static_assert(sizeof(form##_scalars) <= OF_MAX_HYPER * sizeof(double), "scalars of " #form)
OF_FITS_GPU(rmsprop);
OF_FITS_GPU(adadelta);
OF_FITS_GPU(nadam_foreach);
OF_FITS_GPU(radam_foreach);
OF_FITS_GPU(adamax);
OF_FITS_GPU(rprop);
OF_FITS_GPU(adagrad_foreach);
OF_FITS_GPU(asgd_foreach);
OF_FITS_GPU(lion);

#define OF_FITS_HOST(rule, RULE)                                                                   \
    _Static_assert(OF_LENGTH(rule##_hyper) == RULE##_N_HYPER, "names of " #rule "'s options");     \
    _Static_assert((int)RULE##_N_HYPER <= (int)OF_MAX_HYPER, "options of " #rule)

OF_FITS_HOST(adafactor, ADAFACTOR);
OF_FITS_HOST(muon, MUON);

static unsigned no_state_used(const double *hyper) {
    (void)hyper;
    return 0;
}

static void prepare_nothing(const double *hyper, of_count *count, void *scalars) {
    (void)hyper;
    (void)count;
    (void)scalars;
}

#define OF_ROW(rule, RULE)                                                                         \
    .name = #rule, .state = rule##_state, .n_state = RULE##_N_STATE, .hyper = rule##_hyper,        \
    .n_hyper = RULE##_N_HYPER, .scalars_size = sizeof(rule##_scalars),                             \
    .state_used = rule##_state_used, .prepare = rule##_prepare
#define OF_COUNTERS(rule, RULE) .counters = rule##_counters, .n_counters = RULE##_N_COUNTERS

#define OF_GPU(form) .prepare_gpu = form##_prepare
#define OF_HOST_ROW(rule, RULE)                                                                    \
    .name = #rule, .hyper = rule##_hyper, .n_hyper = RULE##_N_HYPER, .state_used = no_state_used,  \
    .prepare = prepare_nothing, .by_host = true

const of_rule of_rules[] = {
    {OF_ROW(adam, ADAM), .counts = true},
    {OF_ROW(sgd, SGD)},
    {OF_ROW(rmsprop, RMSPROP), .counts = true, .chain = true, OF_GPU(rmsprop)},
    {OF_ROW(adadelta, ADADELTA), .counts = true, .chain = true, OF_GPU(adadelta)},
    {OF_ROW(nadam, NADAM), .counts = true, .chain = true, OF_COUNTERS(nadam, NADAM),
     OF_GPU(nadam_foreach)},
    {OF_ROW(radam, RADAM), .counts = true, .chain = true, OF_GPU(radam_foreach)},
    {OF_ROW(adamax, ADAMAX), .counts = true, .chain = true, OF_GPU(adamax)},
    {OF_ROW(rprop, RPROP), .counts = true, .chain = true, OF_GPU(rprop)},
    {OF_ROW(asgd, ASGD), .counts = true, .chain = true, OF_COUNTERS(asgd, ASGD),
     OF_GPU(asgd_foreach), .counts_on_gpu = true},
    {OF_ROW(adagrad, ADAGRAD), .counts = true, OF_GPU(adagrad_foreach)},
    {OF_ROW(lion, LION), .chain = true, OF_GPU(lion)},
    /* By operators of the host; the state is its business. */
    {OF_HOST_ROW(adafactor, ADAFACTOR)},
    {OF_HOST_ROW(muon, MUON)},
    /* Any optimizer whose own code is run on one parameter. */
    {.name = "own", .state_used = no_state_used, .prepare = prepare_nothing, .by_host = true},
    {0},
};

const of_rule *of_rule_find(const char *name) {
    for (const of_rule *rule = of_rules; rule->name; rule++)
        if (strcmp(rule->name, name) == 0)
            return rule;
    return NULL;
}
