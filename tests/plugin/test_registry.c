/* SPDX-License-Identifier: BSD-3-Clause */
/* Keys of memory that comes and goes: a live one is found whatever has gone before it. */
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#include "../sample.h"
#include "internal.h"
#include "random_bits.h"
#include "suite.h"

enum { MOST_LIVE = 120, CHANGES = DRAWN(2000000), CHECKED_EACH = 64 };

static of_plan plan;
static of_update updates[MOST_LIVE];

/* An address such as storages have. It is never read. */
static const void *new_key(uint64_t *random) {
    return (const void *)(uintptr_t)((random_bits(random) % (UINT64_C(1) << 36) + 1) * 16);
}

static bool enter(of_update *update, const void *memory) {
    const void *key = NULL;
    of_update *own = NULL;
    *update = (of_update){.plan = &plan, .kind = &of_update_kind};
    update->in.keys[0] = memory;
    update->in.n_keys = 1;
    return of_registry_add(update, 1, &key, &own) == OF_ADDED;
}

static size_t count_found(size_t n_live) {
    size_t n = 0;
    for (size_t i = 0; i < n_live; i++)
        n += of_is_pending(updates[i].in.keys[0]);
    return n;
}

/* The table has 1,024 entries, and is cleaned each time that half of them have a key. */
TESTS(no_live_key_is_lost, 3) {
    const size_t n_live = (size_t)(MOST_LIVE - 40 + row);
    uint64_t random = n_live;
    bool added = true;
    for (size_t i = 0; i < n_live; i++)
        added = added && enter(&updates[i], new_key(&random));
    for (size_t change = 0; change < CHANGES; change++) {
        of_update *update = &updates[random_bits(&random) % n_live];
        of_registry_remove_one(update);
        added = added && enter(update, new_key(&random));
        if (change % CHECKED_EACH == 0 && count_found(n_live) != n_live)
            ck_abort_msg("after %zu changes %zu of %zu keys are found", change, count_found(n_live),
                         n_live);
    }
    ck_assert(added);
    for (size_t i = 0; i < n_live; i++)
        of_registry_remove_one(&updates[i]);
    ck_assert(!of_any_pending());
    ck_assert_uint_eq(count_found(n_live), 0);
}
