/* SPDX-License-Identifier: BSD-3-Clause */
/* fixture.h: one plan, its parameters, and the yardstick: each parameter has a
 * twin that gets the same gradients and is updated by one direct call of the
 * kernel, with no plan in between. Equal means equal bits. */
#ifndef FIXTURE_H
#define FIXTURE_H

#include <string.h>

#include "fake_host.h"
#include "suite.h"

enum { MAX_TWINS = 64 };

typedef struct twin {
    fake_tensor *tensor;
    size_t slot;
    unsigned char *param; /* what the tensor must become */
    unsigned char *state[OF_MAX_STATE];
    double step;
    const double *hyper;
} twin;

typedef struct fixture {
    fake_host *host;
    of_plan *plan;
    of_pass *pass; /* under way, begun by the first gradient of it; or NULL */
    of_mode mode;
    double hyper[2][OF_MAX_HYPER]; /* two groups of Adam */
    twin twins[MAX_TWINS];
    size_t n;
} fixture;

/* A plan with two groups of Adam in this mode; bucket_bytes 0: the default. */
fixture *setup(of_mode mode, size_t bucket_bytes);
/* The same with a host of the caller's, which the plan's teardown frees. */
fixture *setup_with(fake_host *host, of_mode mode, size_t bucket_bytes);
/* A second plan of the same host, with settings of its own. */
fixture *setup_beside(fixture *first, of_mode mode);
/* Drops the plan, checks every twin and that nothing is pending or held. */
void teardown(fixture *f);
/* Without the checks of values, for tests that expect them to differ. */
void teardown_unchecked(fixture *f);

/* Adds a float32 parameter of random values and returns its twin. */
twin *add(fixture *f, int64_t numel);
void add_some(fixture *f, size_t n, int64_t numel); /* n of them */
twin *add_to_group(fixture *f, int64_t numel, size_t group);
twin *add_eager(fixture *f, int64_t numel);
twin *add_dtype(fixture *f, int64_t numel, of_dtype dtype);
twin *add_tensor(fixture *f, fake_tensor *tensor, size_t group, bool eager);

/* Gives a random gradient to one parameter, or to all. */
void backward(twin *t);
void backward_all(fixture *f);
void backward_expected(fixture *f); /* and updates the yardsticks at once */

/* The yardstick's update of one twin, from its tensor's present gradient. */
void expect_update(fixture *f, twin *t);
void expect_update_at(twin *t, void *param, void **state);
/* optimizer.step() of plan and twins, after the end of the pass; must succeed. */
void step(fixture *f);
void train(fixture *f);                   /* the same, with new gradients for all */
twin *pending(fixture *f, int64_t numel); /* a new one, whose update step() leaves pending */
void step_only(fixture *f);               /* of the plan, whose twins are as they shall be */
/* Backward mode: gives a gradient and says that it is complete, in the pass under way or a
 * new one. */
void gradient(fixture *f, twin *t);
/* The same without giving one; the core's answer. */
of_status ready(fixture *f, size_t slot);
of_pass *begin_pass(fixture *f); /* a new one, with a token of its own */
of_status end_pass(fixture *f);  /* the pass under way, if there is one */

/* Uses parameter and state, as a reader would, and compares them. */
void check_twin(const twin *t);
bool twin_equal(const twin *t);
/* Compares without a use: only what was launched can be equal. */
bool launched(const twin *t);

void set_lr(fixture *f, size_t group, double lr);
of_counts counts(const fixture *f);

/* A test that is given a fixture, made and ended by these. */
#define WITH(name, made, end)                                                                      \
    static void name##_with(fixture *f);                                                           \
    TEST(name) {                                                                                   \
        fixture *f = made;                                                                         \
        name##_with(f);                                                                            \
        end(f);                                                                                    \
    }                                                                                              \
    static void name##_with(fixture *f)
#define FORWARD(name) WITH(name, setup(OF_FORWARD, OF_BUCKET_NONE), teardown)
#define BACKWARD(name, bucket_bytes) WITH(name, setup(OF_BACKWARD, bucket_bytes), teardown)

/* The call's status, and of a failure some of its words. */
#define OK(call) ck_assert_msg((call) == OF_OK, "%s", of_error_message())
#define FAILS(status, call, words)                                                                 \
    do {                                                                                           \
        ck_assert_int_eq(call, status);                                                            \
        ck_assert_msg(strstr(of_error_message(), words), "\"%s\" lacks \"%s\"",                    \
                      of_error_message(), words);                                                  \
    } while (0)
#define INVALID(call, words) FAILS(OF_INVALID, call, words)

#endif
