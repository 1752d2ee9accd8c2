/* SPDX-License-Identifier: BSD-3-Clause */
/* product_launch.c: updates whose gradient is a product of two thin matrices. Panel by panel of
 * its rows the host computes the gradient, into a cache, and the kernel updates these rows. */
#include <stdio.h>

#include "floating.h"
#include "internal.h"

typedef struct of_panels {
    const of_update *update;
    _Atomic int64_t next; /* that a thread takes */
    int64_t end;
    bool past_caches;
    atomic_bool failed;
    char why[256]; /* written by the thread that was the first to set failed */
} of_panels;

of_list of_take_products(of_plan *plan, of_list *list) {
    of_list taken = {0};
    for (of_update *u = list->first, *next; u; u = next) {
        next = u->next;
        if (!u->in.product)
            continue;
        u->factors_of_product = plan->host.product->begin(u->in.product, &u->in.grad);
        if (!u->factors_of_product)
            continue;
        of_list_remove(list, u);
        of_list_append(&taken, u);
    }
    return taken;
}

/* The message is that of this thread of the host's. */
static void note_failure(of_panels *panels) {
    if (!atomic_exchange(&panels->failed, true))
        snprintf(panels->why, sizeof panels->why, "%s", of_error_message());
}

static void run_panel(of_panels *panels, int64_t first, int64_t end) {
    const of_update *u = panels->update;
    const int64_t columns = u->in.numel / u->in.rows;
    const void *grad = u->plan->host.product->rows(u->factors_of_product, first, end);
    if (!grad)
        note_failure(panels);
    else
        of_run_with(u, grad, (size_t)(first * columns), (size_t)(end * columns),
                    panels->past_caches);
}

/* On each thread. */
static void run_panels(void *arg, int64_t unused_begin, int64_t unused_end) {
    (void)unused_begin, (void)unused_end;
    of_panels *panels = arg;
    const of_inputs *in = &panels->update->in;
    const unsigned outside = of_floating_now();
    of_floating_set(panels->update->floating);
    for (int64_t i; (i = atomic_fetch_add(&panels->next, 1)) < panels->end;) {
        const int64_t first = i * in->panel_rows, end_of_panel = first + in->panel_rows;
        run_panel(panels, first, end_of_panel < in->rows ? end_of_panel : in->rows);
    }
    of_floating_set(outside);
}

/* Panels [begin, end) of an update, on several threads. */
static void run_threads(void *arg, int64_t begin, int64_t end, bool past_caches) {
    of_panels *panels = arg;
    const of_host *host = &panels->update->plan->host;
    atomic_store(&panels->next, begin);
    panels->end = end;
    panels->past_caches = past_caches;
    host->parallel_for(host->ctx, end - begin, run_panels, panels);
}

bool of_product_launch(of_plan *plan, of_list *list) {
    bool done = true;
    for (of_update *u = list->first; u; u = u->next) {
        of_panels panels = {.update = u};
        const int64_t n = (u->in.rows + u->in.panel_rows - 1) / u->in.panel_rows;
        of_run_stores(plan, n, run_threads, &panels);
        plan->host.product->end(u->factors_of_product);
        if (atomic_load(&panels.failed)) {
            of_set_error("a panel of a gradient could not be computed: %s", panels.why);
            done = false;
        }
    }
    return done;
}
