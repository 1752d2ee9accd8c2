/* SPDX-License-Identifier: BSD-3-Clause */
/* device_check: runs the CUDA kernels' own source on the CPU, through the code
 * that launches them, and compares every bit with the plain C rows.
 *
 *   device_check [--seed N] [--rounds N] [--only "RULE DTYPE"]
 *   device_check --driver none|old|12.8|before-12.4
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda.h>

#include "batch.h"
#include "cuda/table.h"
#include "host_device.h"
#include "host_driver.h"
#include "packing_check.h"
#include "rules/adam.h"
#include "rules/draws.h"
#include "scale.h"

static int failures;

static void check(bool right, const char *promise) {
    if (!right) {
        printf("FAIL %s\n", promise);
        failures++;
    }
}

static bool round_agrees(batch *b, const of_rule *rule, of_dtype dtype, bool many,
                         uint64_t *random) {
    batch_fill(b, rule, dtype, many, random);
    static const int majors[] = {7, 9, 9, 10}, multiprocessors[] = {1, 2, 30};
    host.multiprocessors = multiprocessors[random_next(random) % 3];
    host.major = majors[random_next(random) % 4];
    host.order = (unsigned)(random_next(random) % HOST_ORDERS);
    b->early = of_cuda_early(host.major, dtype);
    batch_expect(b);
    if (of_cuda_launch(&b->update, b->entries, b->n) != OF_CUDA_OK) {
        printf("  %s\n", of_cuda_error());
        return false;
    }
    return batch_differ(b, true) == 0;
}

static bool is_for_gpus(const of_rule *rule, of_dtype dtype) {
    if (rule->rounds)
        return rule->prepare_gpu && dtype != OF_FLOAT64;
    return rule->prepare_gpu || rule->runs_programs ||
           of_kernel_find(rule->name, OF_REF_CUDA_FUSED, OF_FLOAT32, OF_CPU, OF_ISA_C) != NULL;
}

static void check_instance(batch *b, const of_rule *rule, of_dtype dtype, uint64_t random,
                           int rounds, const char *only) {
    char name[40];
    int bad = 0;
    snprintf(name, sizeof name, "%s %s", b->mixed ? of_rule_mixed(rule) : rule->name,
             of_dtype_name(dtype));
    if (only && strcmp(only, name) != 0)
        return;
    for (int i = 0; i < rounds; i++)
        bad += !round_agrees(b, rule, dtype, i % 10 == 9, &random);
    printf("%-4s %s: %d of %d calls differ from the plain C row\n", bad ? "FAIL" : "ok", name, bad,
           rounds);
    failures += bad;
}

/* A float32 parameter of which a bit can be flipped and behind which a byte can be written:
 * its first element is a number, and no guard page follows. */
static bool can_be_spoiled(const batch *b, size_t i) {
    float first;
    const unsigned char *at = b->tensors[i].mine.at[0], *end = at + b->entries[i].n * sizeof first;
    if (b->entries[i].n == 0 || (uintptr_t)end % 4096 == 0)
        return false;
    memcpy(&first, at, sizeof first);
    return first == first;
}

/* The check sees one wrong bit, and a write beside an array. */
static void check_the_check(batch *b, uint64_t seed) {
    batch_fill(b, of_rule_find("sgd"), OF_FLOAT32, true, &seed);
    b->early = true;
    b->update.found_inf_at = NULL;
    batch_expect(b);
    host.major = 9;
    host.launches = 0;
    check(of_cuda_launch(&b->update, b->entries, b->n) == OF_CUDA_OK, "launches");
    check(host.launches >= 2, "more tensors than a table holds take several launches");
    check(host.launches < 10, "but a table holds hundreds");
    check(batch_differ(b, false) == 0, "equal before a bit is flipped");
    size_t i = 0;
    while (!can_be_spoiled(b, i))
        i++;
    b->tensors[i].mine.at[0][0] ^= 1;
    check(batch_differ(b, false) == 1, "a flipped bit is seen");
    b->tensors[i].mine.at[0][0] ^= 1;
    b->tensors[i].mine.at[0][b->entries[i].n * 4] ^= 1;
    check(batch_differ(b, false) == 1, "a write past the end is seen");
}

static void check_tables(void) {
    float values[64] __attribute__((aligned(16))) = {0};
    const double hyper[OF_MAX_HYPER] = {0.1};
    const of_gpu_update update = {
        .rule = "sgd", .dtype = OF_FLOAT32, .hyper = hyper, .stream = values};
    of_gpu_entry entry = {.param = values, .grad = values + 32, .n = 4, .step = 1};
    host.launches = 0;
    check(of_cuda_launch(&update, NULL, 0) == OF_CUDA_OK && host.launches == 0,
          "no tensors, no launch");
    check(of_cuda_launch(&update, &entry, 1) == OF_CUDA_OK && host.launches == 1, "one launch");
    check(host.bytes == sizeof(of_cuda_small_table), "few tensors take the small table");
    check(host.blocks == 1 && host.stream == values, "one block, on the stream that was given");
    check(sizeof(of_cuda_small_table) <= OF_CUDA_SMALL_BYTES &&
              sizeof(of_cuda_large_table) <= 32764 && sizeof(of_cuda_steps) <= 4096 &&
              sizeof(of_cuda_numbers) <= 4096 && sizeof(of_cuda_packing_table) <= 4096,
          "the tables fit the kernels' arguments");
    host.loaded[0] = '\0';
    check(of_cuda_prepare(&update) == OF_CUDA_OK &&
              strcmp(host.loaded, "of_cuda_sgd_float32_0_small of_cuda_sgd_float32_0_large "
                                  "of_cuda_advance_steps ") == 0,
          "all kernels of an update can be loaded beforehand");
    check(of_cuda_check_loaded(&update) == OF_CUDA_OK, "the driver is asked whether they are");
    host.loaded[0] = '\0';
    check(of_cuda_check_loaded(&update) == OF_CUDA_FAILED, "and one that is not is told");
    const of_gpu_update asgd = {.rule = "asgd", .dtype = OF_FLOAT64, .hyper = hyper};
    host.loaded[0] = '\0';
    check(of_cuda_prepare(&asgd) == OF_CUDA_OK && strstr(host.loaded, "of_cuda_asgd_next "),
          "and what renews its numbers");
}

/* The blocks that update so many elements on a chip of 132 multiprocessors, 0 on
 * failure. */
static size_t blocks_for(of_dtype dtype, size_t n, uint32_t chunk) {
    static double values[1 << 20] __attribute__((aligned(16)));
    const double hyper[OF_MAX_HYPER] = {0.1};
    const of_gpu_update update = {.rule = "sgd", .dtype = dtype, .hyper = hyper, .chunk = chunk};
    const size_t most = sizeof values / sizeof *values;
    of_gpu_entry entries[20];
    size_t n_entries = 0;
    for (size_t left = n; left > 0; left -= entries[n_entries++].n)
        entries[n_entries] = (of_gpu_entry){
            .param = values, .grad = values, .n = left < most ? left : most, .step = 1};
    host.multiprocessors = 132;
    host.launches = 0;
    const of_cuda_status status = of_cuda_launch(&update, entries, n_entries);
    host.multiprocessors = 2;
    return status == OF_CUDA_OK && host.launches == 1 ? host.blocks : 0;
}

static void check_blocks(void) {
    const size_t bucket = 1 << 20;
    check(blocks_for(OF_FLOAT32, bucket, 0) * 1024 == bucket &&
              blocks_for(OF_FLOAT64, bucket / 4, 0) * 512 == bucket / 4 &&
              blocks_for(OF_BFLOAT16, bucket, 0) * 2048 == bucket,
          "each thread has 16 bytes of each array");
    check(blocks_for(OF_FLOAT32, 5 * bucket, 0) * 1024 == 5 * bucket &&
              blocks_for(OF_FLOAT64, bucket, 0) * 1024 == bucket &&
              blocks_for(OF_BFLOAT16, 5 * bucket, 0) * 4096 == 5 * bucket,
          "and 32 of other dtypes than float32, if that leaves blocks enough for the chip");
    check(blocks_for(OF_FLOAT32, bucket, 4096) == 256,
          "whoever measures says how many elements it has");
    check(blocks_for(OF_FLOAT32, bucket, 4100) == 0 && strstr(of_cuda_error(), "4100"),
          "but in multiples of what a cache line holds of any dtype");
}

enum { LANES = 1024 };

/* Tells the elements of a first update that round the product of L2 decay before the sum: there the
 * sum is 0, elsewhere 2^-24; beta1 is 0, so the average becomes the gradient. */
static bool rounds_l2(int major, bool maximize, size_t n, bool (*is_rounded)(size_t)) {
    static float param[LANES + 3], grad[LANES + 3], average[LANES + 3], square[LANES + 3];
    const double hyper[OF_MAX_HYPER] = {[adam_lr] = 0.1,
                                        [adam_beta2] = 0.9,
                                        [adam_eps] = 1e-8,
                                        [adam_weight_decay] = 1 + 0x1p-12,
                                        [adam_maximize] = maximize};
    const of_gpu_update update = {.rule = "adam", .dtype = OF_FLOAT32, .hyper = hyper};
    const of_gpu_entry entry = {
        .param = param, .grad = grad, .state = {average, square}, .n = n, .step = 1};
    for (size_t i = 0; i < n; i++) {
        param[i] = 1 + 0x1p-12f;
        grad[i] = maximize ? 1 + 0x1p-11f : -1 - 0x1p-11f;
        average[i] = square[i] = 0;
    }
    host.major = major;
    bool right = of_cuda_launch(&update, &entry, 1) == OF_CUDA_OK;
    host.major = 9;
    for (size_t i = 0; i < n; i++)
        right = right && average[i] == (is_rounded(i) ? 0 : 0x1p-24f);
    return right;
}

static bool is_first_of_four(size_t i) {
    return i % 4 == 0;
}
static bool is_in_first_block(size_t i) {
    return i / 512 % 4 == 0;
}
static bool is_any(size_t i) {
    return i < SIZE_MAX;
}
static bool is_none(size_t i) {
    return i == SIZE_MAX;
}

/* As read off PyTorch's machine code and seen on an H200 (docs/numerics.md). */
static void check_lanes(void) {
    check(rounds_l2(9, false, LANES, is_first_of_four), "in fours: the first of each four");
    check(rounds_l2(9, false, LANES + 3, is_in_first_block), "else the first of four blocks");
    check(rounds_l2(9, true, LANES, is_any), "to maximize: all");
    check(rounds_l2(10, false, LANES, is_none) && rounds_l2(10, true, LANES, is_none),
          "from compute capability 10 on: none");
}

static void check_errors(void) {
    float values[8] __attribute__((aligned(16))) = {1, 1, 1, 1, 1, 1, 1, 1};
    const double hyper[OF_MAX_HYPER] = {0.1};
    of_gpu_update update = {.rule = "sgd", .dtype = OF_FLOAT32, .hyper = hyper};
    of_gpu_entry entries[2] = {{.param = values, .grad = values + 4, .n = 4, .step = 1},
                                {.param = NULL, .grad = values, .n = 4, .step = 1}};
    host.launches = 0;
    check(of_cuda_launch(&update, entries, 2) == OF_CUDA_INVALID && host.launches == 0 &&
              values[0] == 1.0f,
          "a bad entry is refused before anything is updated");
    check(strstr(of_cuda_error(), "entry 1") != NULL, "the error names the entry");
    entries[0].param = (char *)values + 1;
    check(of_cuda_launch(&update, entries, 1) == OF_CUDA_INVALID, "half an element's address");
    entries[0].param = values;
    host.fail_launch = 1;
    check(of_cuda_launch(&update, entries, 1) == OF_CUDA_FAILED, "a failing launch is reported");
    check(strstr(of_cuda_error(), "made by the test") != NULL, "in the driver's words");
    host.fail_launch = 0;
    const float lr = 0.1f;
    update.rule = "lion";
    update.lr_at = &lr;
    check(of_cuda_launch(&update, entries, 1) == OF_CUDA_INVALID,
          "prepared scalars go with none on the device");
    update.lr_at = NULL;
    update.rule = "asgd";
    of_gpu_entry counted = {.param = values, .grad = values, .state = {values}, .n = 4};
    float number = 1.0f;
    counted.step_at = counted.numbers_at[0] = &number;
    host.launches = 0;
    check(of_cuda_launch(&update, &counted, 1) == OF_CUDA_INVALID && host.launches == 0,
          "a number that is nowhere is refused before anything is updated");
    update.rule = "lbfgs";
    check(of_cuda_launch(&update, entries, 1) == OF_CUDA_UNSUPPORTED, "an unknown rule");
}

static void check_programs(void) {
    float values[16] __attribute__((aligned(16))) = {1, 2, 3, 4, 1, 1, 1, 1};
    const double hyper[OF_MAX_HYPER] = {0};
    static of_instruction code[OF_CUDA_MOST_CODE + 1];
    for (int i = 0; i <= OF_CUDA_MOST_CODE; i++)
        code[i] = (of_instruction){.operation = OF_OPERATOR_add, .b = OF_REGISTER_GRAD, .s = -0.5};
    of_program program = {.code = code, .n = OF_CUDA_MOST_CODE};
    of_gpu_update update = {.rule = "programs", .dtype = OF_FLOAT32, .hyper = hyper};
    of_gpu_entry entry = {.param = values, .grad = values + 4, .n = 4, .step = 1};
    check(!of_program_check(&program), "a program of the largest size");
    check(of_cuda_prepare(&update) == OF_CUDA_OK, "kernels are loaded before there is a program");
    check(of_cuda_launch(&update, &entry, 1) == OF_CUDA_INVALID, "which a launch needs");
    update.program = &program;
    check(of_cuda_launch(&update, &entry, 1) == OF_CUDA_OK && values[0] == -127.0f,
          "every instruction of the largest program runs, in the smaller table or the larger");
    check(host.bytes == sizeof(of_cuda_large_table), "a long program takes the large table");
    check(host_shared_bytes == 2 * OF_CUDA_ROW_BYTES, "and rows for the registers that it names");
    program.n++;
    check(of_cuda_launch(&update, &entry, 1) == OF_CUDA_UNSUPPORTED && values[0] == -127.0f,
          "a longer one is refused");
    program.n = 1;
    code[0].to = OF_REGISTER_TEMPORARY + OF_CUDA_REGISTERS - OF_REGISTER_STATE;
    check(of_cuda_launch(&update, &entry, 1) == OF_CUDA_UNSUPPORTED &&
              strstr(of_cuda_error(), "temporaries"),
          "and one with more registers than the kernel has");
    code[0].to--;
    of_program_check(&program);
    check(of_cuda_launch(&update, &entry, 1) == OF_CUDA_OK &&
              host_shared_bytes == OF_CUDA_REGISTERS * OF_CUDA_ROW_BYTES,
          "all registers of the kernel have rows");
    update.dtype = OF_BFLOAT16;
    check(of_cuda_launch(&update, &entry, 1) == OF_CUDA_OK &&
              host_shared_bytes == OF_CUDA_REGISTERS * OF_CUDA_ROW_BYTES / 2,
          "of 16 bits an element where tensors have as many");
    update.dtype = OF_FLOAT32;
    code[0].to = OF_REGISTER_STATE;
    of_program_check(&program);
    check(of_cuda_launch(&update, &entry, 1) == OF_CUDA_INVALID, "its state has to be there");
    program.by_host = true;
    entry.state[0] = values + 8;
    check(of_cuda_launch(&update, &entry, 1) == OF_CUDA_INVALID, "no GPU calls the host");
    update.rule = "sgd";
    check(of_cuda_launch(&update, &entry, 1) == OF_CUDA_INVALID, "other rules run no programs");
}

enum { MOST_SCALED = 20000 };

/* The CPU's row of scale.h says what a gradient becomes. */
static bool scaling_agrees(of_dtype dtype, arrays *mine, arrays *wanted, uint64_t *random) {
    const float single = near_halves(dtype, random);
    const double factors[OF_MAX_FACTORS] = {dtype == OF_FLOAT64 ? 1.0 / 3.0 : (double)single, 1.0};
    const double hyper[OF_MAX_HYPER] = {0};
    const size_t n = random_next(random) % MOST_SCALED;
    arrays_place(wanted, dtype, n, 0, random);
    arrays_fill(wanted, random);
    arrays_place_aligned(mine, dtype, n, 0, random_next(random) % 2 ? 16 : 1, random);
    arrays_copy(mine, wanted);
    const of_gpu_update update = {.rule = "scaling",
                                   .dtype = dtype,
                                   .hyper = hyper,
                                   .factor_at =
                                       dtype == OF_FLOAT64 ? (void *)factors : (void *)&single};
    const of_gpu_entry entry = {.param = mine->at[0], .grad = mine->at[0], .n = n, .step = 1};
    of_scale_find(dtype, OF_ISA_C)(wanted->at[0], wanted->at[0], n, factors);
    int array;
    size_t element;
    return of_cuda_launch(&update, &entry, 1) == OF_CUDA_OK &&
           arrays_differ(mine, wanted, &array, &element) == 0 && arrays_intact(mine);
}

static void check_scaling(uint64_t random) {
    arrays mine, wanted;
    arrays_create(&mine, MOST_SCALED * sizeof(double));
    arrays_create(&wanted, MOST_SCALED * sizeof(double));
    for (int dtype = 0; dtype < OF_DTYPE_COUNT; dtype++) {
        bool right = true;
        for (int i = 0; i < 20; i++)
            right = right && scaling_agrees((of_dtype)dtype, &mine, &wanted, &random);
        check(right, "a gradient that is read has the bits that the CPU's kernel gives it");
    }
    arrays_destroy(&mine);
    arrays_destroy(&wanted);
}

static void check_steps(void) {
    enum { N = 2 * OF_CUDA_STEPS + 7 };
    static float steps[N], flags = 2.0f;
    static float *at[N];
    for (int i = 0; i < N; i++)
        at[i] = &steps[i];
    host.launches = 0;
    bool right = of_cuda_advance(at, N, NULL, 0, NULL) == OF_CUDA_OK && host.launches == 3;
    for (int i = 0; i < N; i++)
        right &= steps[i] == 1.0f;
    check(right, "every step is counted once");
    right = of_cuda_advance(at, N, &flags, 0, NULL) == OF_CUDA_OK;
    for (int i = 0; i < N; i++)
        right &= steps[i] == 0.0f;
    check(right, "the flags of two devices are subtracted from every step that is counted");
}

/* As tests/kernels/test_draws.c has them by the definition. */
static uint32_t drawn(const of_gpu_draws *draws, uint64_t element) {
    const uint32_t place = (uint32_t)(element % (64 * draws->halves)), row = place / 16;
    const uint64_t block = element / (64 * draws->halves) * 16 + place % 16;
    uint32_t words[] = {(uint32_t)block, (uint32_t)(block >> 32), draws->step, draws->parameter};
    of_philox(words, draws->seed);
    return draws->halves == 1 ? words[row] : words[row / 2] >> row % 2 * 16 & 0xffff;
}

static void check_draws(uint64_t random) {
    static uint32_t to[5002];
    bool right = true;
    for (int i = 0; i < 60; i++) {
        of_gpu_draws draws = {.to = to + 1,
                              .n = random_next(&random) % (i % 3 ? 200 : 5000),
                              .first = random_next(&random) >> (i % 2 ? 20 : 56),
                              .seed = random_next(&random),
                              .step = (uint32_t)random_next(&random),
                              .parameter = (uint32_t)random_next(&random),
                              .halves = 1 + (uint32_t)random_next(&random) % 2};
        host.order = (unsigned)i % HOST_ORDERS;
        memset(to, 0, sizeof to);
        right = right && of_cuda_draw(&draws, 0, NULL) == OF_CUDA_OK;
        for (uint64_t k = 0; k < 5000; k++)
            right = right && to[1 + k] == (k < draws.n ? drawn(&draws, draws.first + k) : 0);
        right = right && to[0] == 0;
    }
    check(right, "integers of stochastic rounding are those of their places, and no other is written");
}

static void check_capture(void) {
    int captured, other;
    uint64_t id = 99;
    host.captured = &captured;
    host.graph = 5;
    bool right = of_cuda_capture(0, &captured, &id) == OF_CUDA_OK && id == 5;
    right = right && of_cuda_capture(0, &other, &id) == OF_CUDA_OK && id == 0;
    host.implicit = true;
    id = 99;
    right = right && of_cuda_capture(0, &other, &id) == OF_CUDA_OK && id == 0;
    host.graph = 0;
    check(right, "only the captured stream has a graph");

    host.graph = 5;
    host_context = false;
    right = of_cuda_capture(0, &captured, &id) == OF_CUDA_OK && id == 5 && host_context;
    host.graph = 0;
    check(right, "a thread without a context gets the device's");

    host.mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    of_cuda_relax(true);
    of_cuda_relax(true);
    of_cuda_relax(false);
    right = host.mode == CU_STREAM_CAPTURE_MODE_RELAXED;
    of_cuda_relax(false);
    check(right && host.mode == CU_STREAM_CAPTURE_MODE_GLOBAL, "the mode is put back, nested too");
}

/* Before anything is loaded. */
static void check_loading(void) {
    float values[8] __attribute__((aligned(16))) = {0};
    const double hyper[OF_MAX_HYPER] = {0.1};
    const of_gpu_update update = {.rule = "sgd", .dtype = OF_FLOAT32, .hyper = hyper};
    const of_gpu_entry entry = {.param = values, .grad = values, .n = 4, .step = 1};
    host.fail_load = CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
    check(of_cuda_launch(&update, &entry, 1) == OF_CUDA_FAILED &&
              strstr(of_cuda_error(), "update the driver, or build"),
          "a chip that only a newer driver can compile for is named");
    check(!host.loaded_older, "a driver of this release gets the code that was made for chips");
    host.fail_load = CUDA_SUCCESS;
    check(of_cuda_launch(&update, &entry, 1) == OF_CUDA_OK, "and loading is tried again");
}

static void check_contexts(void) {
    float values[8] __attribute__((aligned(16))) = {0};
    const double hyper[OF_MAX_HYPER] = {0.1};
    of_gpu_update update = {.rule = "sgd", .dtype = OF_FLOAT32, .hyper = hyper};
    const of_gpu_entry entry = {.param = values, .grad = values, .n = 4, .step = 1};
    host_context = false;
    host.retained = 0;
    check(of_cuda_launch(&update, &entry, 1) == OF_CUDA_OK && host_context,
          "without a context the device's own is used");
    host_context = false;
    check(of_cuda_launch(&update, &entry, 1) == OF_CUDA_OK && host_context && host.retained <= 1,
          "which a second thread does not retain again");
    host.launches = 0;
    update.device = 1;
    check(of_cuda_launch(&update, &entry, 1) == OF_CUDA_INVALID && host.launches == 0 &&
              strstr(of_cuda_error(), "on GPU 1"),
          "another device's context is refused");
}

/* 2^36 elements: nothing of such a call may have been launched. */
static void check_most_elements(void) {
    float values[4] __attribute__((aligned(16))) = {1, 1, 1, 1};
    const double hyper[OF_MAX_HYPER] = {0.1};
    const of_gpu_update update = {.rule = "sgd", .dtype = OF_FLOAT32, .hyper = hyper};
    const of_gpu_entry entry = {.param = values, .grad = values, .n = 4, .step = 1};
    of_gpu_entry entries[] = {entry, entry, entry};
    entries[1].step_at = values; /* another kind of step, so that the first table is full */
    entries[2].n = ((size_t)1 << 36) + 1;
    host.launches = 0;
    check(of_cuda_launch(&update, entries, 3) == OF_CUDA_INVALID && host.launches == 0 &&
              strstr(of_cuda_error(), "entry 2"),
          "a tensor that is too large is refused before the first launch");
}

/* cuFuncLoad is of CUDA 12.4: before, a function is asked for and loaded when launched. */
static int without_function_load(void) {
    const double hyper[OF_MAX_HYPER] = {0.1};
    const of_gpu_update update = {.rule = "sgd", .dtype = OF_FLOAT32, .hyper = hyper};
    host.no_function_load = true;
    check(of_cuda_prepare(&update) == OF_CUDA_OK && strstr(host.found, "of_cuda_sgd_float32") &&
              !host.loaded[0],
          "a driver that can't load functions beforehand will do");
    check(of_cuda_check_loaded(&update) == OF_CUDA_UNSUPPORTED, "and does not say what is loaded");
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}

/* Code of CUDA 13 does not load under a driver of CUDA 12.8: the PTX for older ones does. */
static int with_older_code(void) {
    const double hyper[OF_MAX_HYPER] = {0.1};
    const of_gpu_update update = {.rule = "sgd", .dtype = OF_FLOAT32, .hyper = hyper};
    host.version = 12080;
    check(of_cuda_prepare(&update) == OF_CUDA_OK && host.loaded_older,
          "a driver of the release before gets the PTX for older drivers");
    host.loaded_older = false;
    check(of_cuda_prepare_packing(OF_FLOAT32, 0) == OF_CUDA_OK && host.loaded_older,
          "for every kernel");
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}

/* The driver is opened once a process: this one is opened without it. */
static int without_driver(const char *how) {
    if (strcmp(how, "before-12.4") == 0)
        return without_function_load();
    if (strcmp(how, "12.8") == 0)
        return with_older_code();
    if (strcmp(how, "none") == 0)
        host.missing = true;
    else
        host.version = 12000;
    check(of_cuda_open() == OF_CUDA_NO_DRIVER, "a missing or old driver is reported");
    check(of_cuda_launch(NULL, NULL, 0) == OF_CUDA_NO_DRIVER, "at every call");
    check(strstr(of_cuda_error(), strcmp(how, "none") == 0 ? "took the driver" : "up to 12.0"),
          "the error says what is wrong");
    check(strcmp(how, "none") == 0 || strstr(of_cuda_error(), "for 12.1"), "and what is needed");
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}

int main(int argc, char **argv) {
    uint64_t seed = 1;
    int rounds = 40;
    const char *only = NULL;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--seed") == 0)
            seed = strtoull(argv[i + 1], NULL, 0) | 1;
        else if (strcmp(argv[i], "--rounds") == 0)
            rounds = atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--only") == 0)
            only = argv[i + 1];
        else if (strcmp(argv[i], "--driver") == 0)
            return without_driver(argv[i + 1]);
    }
    static batch b;
    batch_create(&b, MOST_TENSORS, MOST_LENGTH);
    check_loading();
    for (const of_rule *rule = of_rules; rule->name; rule++)
        for (of_dtype dtype = 0; dtype < OF_DTYPE_COUNT; dtype++)
            if (is_for_gpus(rule, dtype))
                check_instance(&b, rule, dtype, seed, rule->prepare_gpu ? rounds / 2 : rounds,
                               only);
    b.mixed = true;
    check_instance(&b, of_rule_find("adam"), OF_FLOAT32, seed, rounds, only);
    b.mixed = false;
    check_the_check(&b, seed);
    batch_destroy(&b);
    check_tables();
    check_blocks();
    check_lanes();
    check_contexts();
    check_most_elements();
    check_errors();
    check_programs();
    check_scaling(seed);
    check_steps();
    check_draws(seed);
    check_capture();
    failures += check_packing(seed);
    printf(failures ? "%d failures, seed %" PRIu64 "\n" : "all agree\n", failures, seed);
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
