/* SPDX-License-Identifier: BSD-3-Clause */
#include "mutant_inputs.h"

#include <fenv.h>
#include <math.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include "host_driver.h"
#include "machine.h"
#include "packing.h"
#include "rules/sgd.h"

enum { SHORT = 1200, LONGEST = 5000, LONG = 20000, MOST_ROWS = 70, LONG_ROWS = 1540 };

static void *allocated(size_t bytes) {
    void *made = malloc(bytes + 1);
    if (!made)
        abort();
    return made;
}

static void add_area(input *in, void *at, size_t bytes) {
    area *a = &in->areas[in->n_areas++];
    *a = (area){at, allocated(bytes), allocated(bytes), bytes};
    memcpy(a->before, at, bytes);
}

static void fill_packing(input *in, size_t n, of_dtype dtype, uint64_t *random) {
    static const of_cuda_packing_task tasks[] = {OF_CUDA_PACKING_ADD, OF_CUDA_PACKING_MERGE,
                                                 OF_CUDA_PACKING_UNPACK};
    const size_t ld = n + random_next(random) % 3;
    const size_t packed = of_packed_elements(n) * in->element, matrix = n * ld * in->element;
    arrays *memory = &in->b.tensors[0].mine;
    arrays_place(memory, dtype, n * ld, 0, random);
    arrays_fill(memory, random);
    const of_cuda_packing_task task = tasks[random_next(random) % 3];
    const bool merges = task == OF_CUDA_PACKING_MERGE;
    in->packing = (of_cuda_packing){.task = task,
                                    .dtype = dtype,
                                    .to = memory->at[0],
                                    .from = memory->at[1],
                                    .n = merges ? of_packed_elements(n) : n,
                                    .ld = ld,
                                    .numbers = {0.3 + random_real(random), 0.7}};
    add_area(in, memory->at[0], task == OF_CUDA_PACKING_UNPACK ? matrix : packed);
}

static void fill_scaling(input *in, of_dtype dtype, uint64_t *random) {
    batch *b = &in->b;
    batch_fill(b, of_rule_find("sgd"), dtype, true, random);
    b->update = (of_gpu_update){.rule = "scaling",
                                 .dtype = dtype,
                                 .hyper = b->hyper,
                                 .factor_at = dtype == OF_FLOAT64 ? (void *)&b->wide_factor
                                                                  : (void *)&b->factor};
}

/* A buffer and a gradient of which nearly nothing is left in SGD's sum: what is left shows which
 * of its products was rounded, in 16 bits, too. The best of some. */
static void cancel(const input *in, of_dtype dtype, const arrays *mine, size_t k,
                   uint64_t *random) {
    const double *hyper = in->b.hyper;
    const double weight = (1 - hyper[sgd_dampening]) * (hyper[sgd_maximize] != 0 ? 1 : -1);
    unsigned char *buffer = mine->at[2] + k * in->element, *grad = mine->at[1] + k * in->element;
    unsigned char best[2][8];
    double least = INFINITY;
    for (int i = 0; i < 64; i++) {
        arrays_put(buffer, dtype, random_real(random) * 2 - 1);
        const double product = arrays_get(buffer, dtype) * hyper[sgd_momentum];
        arrays_put(grad, dtype, product / weight);
        const double left = fabs((product - arrays_get(grad, dtype) * weight) / product);
        if (left < least) {
            least = left;
            memcpy(best[0], buffer, in->element);
            memcpy(best[1], grad, in->element);
        }
    }
    memcpy(buffer, best[0], in->element);
    memcpy(grad, best[1], in->element);
}

static void cancel_some(input *in, of_dtype dtype, uint64_t *random) {
    const double *hyper = in->b.hyper;
    if (in->b.update.grad_scale_at || hyper[sgd_weight_decay] != 0 || hyper[sgd_momentum] == 0)
        return;
    in->b.update.factor_at = NULL; /* it would round the gradient */
    for (size_t i = 0; i < in->b.n; i++)
        for (size_t k = 0; k < in->b.tensors[i].mine.n; k += 3)
            cancel(in, dtype, &in->b.tensors[i].mine, k, random);
}

static void add_arrays(input *in) {
    for (size_t i = 0; i < in->b.n; i++)
        for (int k = 0; k < N_ARRAYS; k++)
            if (in->b.tensors[i].mine.at[k] && in->b.entries[i].param)
                add_area(in, in->b.tensors[i].mine.at[k], in->b.entries[i].n * in->element);
}

void input_fill(input *in, const char *rule, of_dtype dtype, bool is_long, uint64_t random) {
    static const int majors[] = {7, 9, 9, 10}, multiprocessors[] = {1, 2, 30};
    static const uint32_t chunks[] = {0, 0, 512, 4096};
    memset(in, 0, sizeof *in);
    in->packs = strcmp(rule, "packing") == 0;
    const size_t mostly = random_next(&random) % 4 ? SHORT : LONGEST;
    const size_t longest = is_long ? LONG : mostly;
    /* In long rows a thread takes four elements at once, for some pairs in both. */
    const size_t rows =
        random_next(&random) % 16 ? 1 + random_next(&random) % MOST_ROWS : LONG_ROWS;
    batch_create(&in->b, in->packs ? 1 : TENSORS, in->packs ? rows * (rows + 2) : longest);
    in->element = of_dtype_size(dtype);
    in->major = majors[random_next(&random) % 4];
    in->multiprocessors = multiprocessors[random_next(&random) % 3];
    in->order = (unsigned)(random_next(&random) % HOST_ORDERS);
    if (in->packs) {
        fill_packing(in, rows, dtype, &random);
        return;
    }
    if (strcmp(rule, "scaling") == 0)
        fill_scaling(in, dtype, &random);
    else
        batch_fill(&in->b, of_rule_find(rule), dtype, true, &random);
    if (strcmp(rule, "sgd") == 0)
        cancel_some(in, dtype, &random);
    in->b.n = is_long ? TENSORS : 1 + random_next(&random) % TENSORS;
    in->b.update.chunk = chunks[random_next(&random) % 4];
    add_arrays(in);
}

void input_drop(input *in) {
    for (size_t i = 0; i < in->n_areas; i++) {
        free(in->areas[i].before);
        free(in->areas[i].after);
    }
    batch_destroy(&in->b);
}

bool input_run(input *in) {
    jmp_buf caught;
    for (size_t i = 0; i < in->n_areas; i++)
        memcpy(in->areas[i].at, in->areas[i].before, in->areas[i].bytes);
    host.major = in->major;
    host.multiprocessors = in->multiprocessors;
    host.order = in->order;
    ptx_now.caught = &caught;
    const bool failed = setjmp(caught) != 0;
    if (!failed && in->packs && of_cuda_pack(&in->packing) != OF_CUDA_OK)
        abort();
    if (!failed && !in->packs &&
        of_cuda_launch(&in->b.update, in->b.entries, in->b.n) != OF_CUDA_OK)
        abort();
    ptx_now.caught = NULL;
    fesetround(FE_TONEAREST);
    return !failed;
}
