/* SPDX-License-Identifier: BSD-3-Clause */
/* launch.c: fills tables with tensors and launches the kernels on them. */
#include <string.h>

#include "images.h"
#include "launch.h"

enum { SMALL, LARGE };

/* A multiprocessor needs so many blocks at once to keep its memory busy. */
enum { BLOCKS_EACH = 4, VECTOR_BYTES = 16 };

/* One call of of_cuda_launch. */
typedef struct call {
    const of_driver *driver;
    const of_gpu_update *update;
    const of_cuda_kernels *kernels;
    of_cuda_state state;
    size_t code; /* words of the program before the first entry */
    size_t stride; /* words of an entry */
    unsigned rows; /* of registers that the program uses; 0: there is none */
    int multiprocessors;
    uint64_t elements; /* of all entries in the table */
    of_cuda_large_table table; /* a small one begins with the same fields */
} call;

/* Elements of one launch. Even of the smallest chunks a grid can have enough blocks for them,
 * and for blocks that are not full. */
static const uint64_t MOST_ELEMENTS = (uint64_t)OF_CUDA_CHUNK_UNIT << 30;

int of_cuda_abi_version(void) {
    return OF_CUDA_ABI_VERSION;
}

of_cuda_status of_cuda_open(void) {
    of_cuda_status status;
    of_driver_open(&status);
    return status;
}

static bool misplaced(const void *array, size_t size) {
    return !array || (uintptr_t)array % size != 0;
}

static of_cuda_status check_numbers(const call *c, const of_gpu_entry *entry, size_t index) {
    const unsigned numbers = c->table.common.numbers;
    bool right = numbers == 0 || entry->step_at;
    for (unsigned i = 0; i < numbers; i++)
        right = right && !misplaced(entry->numbers_at[i], sizeof(float));
    return right ? OF_CUDA_OK
                 : of_cuda_fail(OF_CUDA_INVALID, "entry %zu: a number misplaced", index);
}

static of_cuda_status check_entry(const call *c, const of_gpu_entry *entry, size_t index) {
    if (entry->n > MOST_ELEMENTS)
        return of_cuda_fail(OF_CUDA_INVALID, "entry %zu: a tensor of %zu elements", index,
                            entry->n);
    const size_t size = of_dtype_size(c->update->dtype);
    if (misplaced(entry->param, size) || misplaced(entry->grad, size))
        return of_cuda_fail(OF_CUDA_INVALID, "entry %zu: parameter or gradient misplaced", index);
    const of_program *program = c->update->program;
    const unsigned used =
        program ? (program->reads | program->writes) >> OF_REGISTER_STATE : c->state.used;
    for (unsigned i = 0; i < OF_MAX_STATE; i++)
        if ((used & (1u << i)) && misplaced(entry->state[i], c->state.bytes))
            return of_cuda_fail(OF_CUDA_INVALID, "entry %zu: state %u misplaced", index, i);
    return OF_CUDA_OK;
}

/* A thread takes one vector of each array. Of dtypes other than float32 it takes two if that
 * leaves blocks enough for the whole chip, as measured on an H200. */
static uint32_t chunk_of(const call *c) {
    const size_t size = of_dtype_size(c->update->dtype);
    const size_t wide = size < sizeof(float) ? sizeof(float) : size;
    const uint64_t wanted = (uint64_t)BLOCKS_EACH * (uint64_t)c->multiprocessors;
    const uint32_t vectors = (uint32_t)(c->rows ? OF_CUDA_ROW_BYTES / wide
                                                : OF_CUDA_THREADS * VECTOR_BYTES / size);
    const bool two = size != sizeof(float) && c->elements / wanted >= 2 * (uint64_t)vectors;
    if (c->update->chunk)
        return c->update->chunk;
    return two ? 2 * vectors : vectors;
}

/* Gives each entry its first block; how many blocks there are in all. */
static uint64_t share_blocks(call *c) {
    const uint32_t chunk = c->table.common.chunk = chunk_of(c);
    uint64_t blocks = 0;
    for (uint32_t i = 0; i < c->table.common.entries; i++) {
        uint64_t *first = c->table.words + c->code + (i + 1) * c->stride - 1;
        *first = blocks;
        blocks += (first[-1] + chunk - 1) / chunk;
    }
    return blocks;
}

/* Launches the kernel on the table and empties the table: the driver has copied the arguments
 * when launch() returns. */
static of_cuda_status flush(call *c) {
    of_cuda_common *common = &c->table.common;
    if (common->entries == 0)
        return OF_CUDA_OK;
    const uint64_t blocks = share_blocks(c);
    const size_t words = c->code + common->entries * c->stride;
    const int size = words <= OF_CUDA_WORDS(OF_CUDA_SMALL_BYTES) ? SMALL : LARGE;
    void *parameters[] = {&c->table};
    const unsigned threads = c->rows ? OF_CUDA_PROGRAM_THREADS : OF_CUDA_THREADS;
    const unsigned shared = c->rows * of_cuda_row_bytes(c->update->dtype);
    const CUresult result = c->driver->launch(
        (CUfunction)c->kernels->size[size], (unsigned)blocks, 1, 1, threads, 1, 1, shared,
        (CUstream)c->update->stream, parameters, NULL);
    common->entries = 0;
    c->elements = 0;
    return result == CUDA_SUCCESS ? OF_CUDA_OK : of_driver_fail(c->driver, result, "launch");
}

static uint64_t step_word(const of_gpu_entry *entry) {
    const float step = (float)entry->step;
    uint32_t bits;
    memcpy(&bits, &step, sizeof bits);
    return entry->step_at ? (uint64_t)(uintptr_t)entry->step_at
                          : (uint64_t)entry->parameter << 32 | bits;
}

static void append(call *c, const of_gpu_entry *entry) {
    of_cuda_common *common = &c->table.common;
    uint64_t *word = c->table.words + c->code + common->entries * c->stride;
    *word++ = (uint64_t)(uintptr_t)entry->param;
    *word++ = (uint64_t)(uintptr_t)entry->grad;
    for (unsigned i = 0; i < OF_MAX_STATE; i++)
        if (c->state.used & (1u << i))
            *word++ = (uint64_t)(uintptr_t)entry->state[i];
    for (unsigned i = 0; i < common->numbers; i++)
        *word++ = (uint64_t)(uintptr_t)entry->numbers_at[i];
    *word++ = step_word(entry);
    *word++ = entry->n;
    common->steps_on_device = entry->step_at != NULL;
    common->entries++;
    c->elements += entry->n;
}

static of_cuda_status add(call *c, const of_gpu_entry *entry) {
    const of_cuda_common *common = &c->table.common;
    const bool full =
        c->code + (common->entries + 1) * c->stride > OF_CUDA_WORDS(OF_CUDA_LARGE_BYTES);
    const bool other = common->steps_on_device != (entry->step_at != NULL);
    of_cuda_status status = OF_CUDA_OK;
    if (full || other || c->elements + entry->n > MOST_ELEMENTS)
        status = flush(c);
    if (status == OF_CUDA_OK)
        append(c, entry);
    return status;
}

/* Into the table, once for all of its launches. */
static of_cuda_status put_program(call *c) {
    const of_program *program = c->update->program;
    c->code = 0;
    c->rows = 0;
    if (!program)
        return c->table.common.runs_programs ? of_cuda_fail(OF_CUDA_INVALID, "no program")
                                             : OF_CUDA_OK;
    if (!c->table.common.runs_programs || program->by_host)
        return of_cuda_fail(OF_CUDA_INVALID, "%s runs no such program", c->update->rule);
    const char *why = of_cuda_put_code(&c->table, c->update->dtype, program, &c->rows);
    if (why)
        return of_cuda_fail(OF_CUDA_UNSUPPORTED, "%s", why);
    c->code = program->n * of_cuda_instruction_words(c->update->dtype);
    return OF_CUDA_OK;
}

static of_cuda_status begin(call *c, const of_gpu_update *update) {
    of_cuda_status status;
    CUdevice device = 0;
    int major = 0;
    c->update = update;
    c->elements = 0;
    c->driver = of_driver_open(&status);
    if (!c->driver)
        return status;
    if (!update->rule || !update->hyper || (unsigned)update->dtype >= OF_DTYPE_COUNT)
        return of_cuda_fail(OF_CUDA_INVALID, "no rule, no options or an unknown dtype");
    if (update->chunk % OF_CUDA_CHUNK_UNIT != 0)
        return of_cuda_fail(OF_CUDA_INVALID, "blocks of %u elements: no multiple of %d",
                            (unsigned)update->chunk, (int)OF_CUDA_CHUNK_UNIT);
    status = of_driver_enter(c->driver, update->device, &device);
    if (status != OF_CUDA_OK)
        return status;
    CUresult result =
        c->driver->device_attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
    if (result == CUDA_SUCCESS)
        result = c->driver->device_attribute(&c->multiprocessors,
                                             CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
    if (result != CUDA_SUCCESS)
        return of_driver_fail(c->driver, result, "compute capability or multiprocessors");
    return of_cuda_rule(update, &c->state, &c->table.common, of_cuda_early(major, update->dtype));
}

typedef of_cuda_status use_fn(const of_driver *driver, CUkernel kernel);

/* For all kernels of the update. */
static of_cuda_status use_kernels(const of_gpu_update *update, use_fn *use) {
    call c;
    CUkernel single = NULL;
    of_cuda_status status = begin(&c, update);
    if (status != OF_CUDA_OK)
        return status;
    c.kernels = of_cuda_find(c.driver, update->rule, update->dtype, c.state.used, &status);
    for (int size = 0; size < OF_CUDA_TABLE_SIZES && status == OF_CUDA_OK; size++)
        status = use(c.driver, c.kernels->size[size]);
    for (int which = 0; which < OF_CUDA_PACKING && status == OF_CUDA_OK; which++) {
        if (which == OF_CUDA_ASGD_NEXT && c.table.common.numbers == 0)
            continue;
        status = of_cuda_find_single(c.driver, (of_cuda_single)which, &single);
        if (status == OF_CUDA_OK)
            status = use(c.driver, single);
    }
    return status;
}

of_cuda_status of_cuda_prepare(const of_gpu_update *update) {
    return use_kernels(update, of_cuda_load);
}

of_cuda_status of_cuda_check_loaded(const of_gpu_update *update) {
    return use_kernels(update, of_cuda_look_loaded);
}

of_cuda_status of_cuda_launch(const of_gpu_update *update, const of_gpu_entry *entries,
                              size_t n_entries) {
    call c;
    of_cuda_status status = begin(&c, update);
    if (status != OF_CUDA_OK)
        return status;
    c.kernels = of_cuda_find(c.driver, update->rule, update->dtype, c.state.used, &status);
    if (!c.kernels)
        return status;
    const size_t numbers = c.table.common.numbers;
    c.stride = OF_CUDA_WORDS_BESIDE_STATE + (size_t)__builtin_popcount(c.state.used) + numbers;
    status = put_program(&c);
    /* All are checked before the first launch: nothing is half updated. */
    for (size_t i = 0; i < n_entries && status == OF_CUDA_OK; i++) {
        status = check_numbers(&c, &entries[i], i);
        if (status == OF_CUDA_OK && entries[i].n > 0)
            status = check_entry(&c, &entries[i], i);
    }
    for (size_t i = 0; i < n_entries && status == OF_CUDA_OK; i++)
        if (entries[i].n > 0)
            status = add(&c, &entries[i]);
    if (status == OF_CUDA_OK)
        status = flush(&c);
    return status == OF_CUDA_OK && numbers ? of_cuda_next_numbers(c.driver, update, entries, n_entries)
                                           : status;
}
