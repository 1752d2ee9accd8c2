// SPDX-License-Identifier: BSD-3-Clause
// program.cu: runs a program (../program.h) over many tensors in one launch, in the roundings
// of PyTorch's CUDA operators. The build compiles it once per dtype.
//
// Instructions lie before the tensors in the kernel's arguments, where all threads read one at
// a time without a cost. Each thread has some elements' registers in registers of its own:
// these can't be counted through, so a switch goes to the one that is meant, and as all threads
// go there no warp divides.
#include "block.cuh"

enum {
    OF_PACK = sizeof(of_real) == 8 ? 2 : 4, // elements of a thread at once
    OF_INSTRUCTION_WORDS = sizeof(of_real) == 8 ? 3 : 2,
    OF_ALL_STATE = (1 << OF_MAX_STATE) - 1,
    OF_BLOCKS = 2 // that a multiprocessor has registers for
};

struct of_row {
    of_real lane[OF_PACK];
};

struct of_file {
    of_row row[OF_CUDA_REGISTERS];
};

#define OF_EACH_REGISTER(X)                                                                        \
    X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)
static_assert(OF_CUDA_REGISTERS == 14, "OF_EACH_REGISTER has as many");

OF_DEVICE_FN of_row of_read(const of_file &file, unsigned number) {
    switch (number) {
#define OF_CASE(k)                                                                                 \
    case k:                                                                                        \
        return file.row[k];
        OF_EACH_REGISTER(OF_CASE)
#undef OF_CASE
    default:
        return file.row[0];
    }
}

OF_DEVICE_FN void of_write(of_file *file, unsigned number, const of_row &row) {
    switch (number) {
#define OF_CASE(k)                                                                                 \
    case k:                                                                                        \
        file->row[k] = row;                                                                        \
        break;
        OF_EACH_REGISTER(OF_CASE)
#undef OF_CASE
    default:
        break;
    }
}

// The number that begins at this half of a word, or at this word.
OF_DEVICE_FN of_real of_number(const uint64_t *words, int which) {
    return reinterpret_cast<const of_real *>(words)[which];
}

OF_DEVICE_FN void of_run(const uint64_t *word, unsigned code, of_file *file) {
#pragma unroll 1
    for (unsigned i = 0; i < code; i++, word += OF_INSTRUCTION_WORDS) {
        const unsigned first = static_cast<unsigned>(*word);
        const unsigned second = static_cast<unsigned>(*word >> 32), inputs = second >> 8;
        const of_row a = of_read(*file, first >> 16 & 255);
        of_row b = a, c = a, to = a;
        if (inputs > 1)
            b = of_read(*file, first >> 24);
        if (inputs > 2)
            c = of_read(*file, second & 255);
        of_operate(first & 255, OF_PACK, to.lane, a.lane, b.lane, c.lane, of_number(word + 1, 0),
                   of_number(word + 1, 1));
        of_write(file, first >> 8 & 255, to);
    }
}

// The elements of one thread at once: neighbours, or as far apart as there are threads.
struct of_place {
    unsigned at, end; // of the block's elements
    bool packed;
};

OF_DEVICE_FN of_row of_load_row(const of_stored *from, const of_place &place) {
    of_row row;
    if (place.packed) {
        const of_pack<OF_PACK> pack = of_load<OF_PACK>(from, place.at);
#pragma unroll
        for (int lane = 0; lane < OF_PACK; lane++)
            row.lane[lane] = of_widen(pack.lane[lane]);
        return row;
    }
#pragma unroll
    for (int lane = 0; lane < OF_PACK; lane++) {
        const unsigned at = place.at + lane * blockDim.x;
        row.lane[lane] = at < place.end ? of_widen(from[at]) : (of_real)0;
    }
    return row;
}

OF_DEVICE_FN void of_store_row(of_stored *to, const of_place &place, const of_row &row) {
    if (place.packed) {
        of_pack<OF_PACK> pack;
#pragma unroll
        for (int lane = 0; lane < OF_PACK; lane++)
            pack.lane[lane] = of_narrow(row.lane[lane]);
        of_store<OF_PACK>(to, place.at, pack);
        return;
    }
#pragma unroll
    for (int lane = 0; lane < OF_PACK; lane++) {
        const unsigned at = place.at + lane * blockDim.x;
        if (at < place.end)
            to[at] = of_narrow(row.lane[lane]);
    }
}

OF_DEVICE_FN void of_scale(of_row *grad, const of_factor &factor) {
    if (factor.given)
#pragma unroll
        for (int lane = 0; lane < OF_PACK; lane++)
            grad->lane[lane] = of_widen(of_narrow(grad->lane[lane] * factor.by));
}

// The first of the block's elements.
OF_DEVICE_FN uint64_t of_begin(const of_cuda_common &common, const uint64_t *entry) {
    return (blockIdx.x - entry[of_words<OF_ALL_STATE>::STRIDE - 1]) * common.chunk;
}

// The address of an array: an entry begins with the addresses in the order of registers.
OF_DEVICE_FN of_stored *of_memory(const of_cuda_common &common, const uint64_t *entry, int number) {
    return reinterpret_cast<of_stored *>(entry[number]) + of_begin(common, entry);
}

// An address costs two registers: it is made again where it is needed, and the compiler, which
// would keep it, does not see that it is the same.
OF_DEVICE_FN unsigned of_again(unsigned entry) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(entry));
#endif
    return entry;
}

OF_DEVICE_FN void of_run_at(const of_cuda_common &common, const uint64_t *words, unsigned entry,
                            const of_place &place) {
    of_file file = {};
#pragma unroll
    for (int k = 0; k < OF_REGISTER_TEMPORARY; k++)
        if (common.reads >> k & 1)
            file.row[k] = of_load_row(of_memory(common, words + entry, k), place);
    of_scale(&file.row[OF_REGISTER_GRAD], of_factor_of(common));
    of_run(words, common.code, &file);
    entry = of_again(entry);
#pragma unroll
    for (int k = 0; k < OF_REGISTER_TEMPORARY; k++)
        if (common.writes >> k & 1)
            of_store_row(of_memory(common, words + entry, k), place, file.row[k]);
}

// One thread's part of a block. All threads go round as often: the last time some have none.
OF_DEVICE_FN void of_run_block(const of_cuda_common &common, const uint64_t *words) {
    const uint64_t *first = words + common.code * OF_INSTRUCTION_WORDS;
    const uint64_t *found = of_find<OF_ALL_STATE>(first, common.entries, blockIdx.x);
    const of_tensor tensor = of_unpack<OF_ALL_STATE>(found);
    const bool aligned = of_aligned<OF_ALL_STATE>(tensor, OF_PACK * sizeof(of_stored));
    const uint64_t left = tensor.n - of_begin(common, found);
    const unsigned end = left < common.chunk ? static_cast<unsigned>(left) : common.chunk;
    const unsigned round = blockDim.x * OF_PACK;
#pragma unroll 1
    for (unsigned at = 0; at < end; at += round) {
        const bool packed = aligned && end - at >= round;
        const of_place place = {at + threadIdx.x * (packed ? OF_PACK : 1), end, packed};
        of_run_at(common, words, static_cast<unsigned>(found - words), place);
    }
}

#define OF_PROGRAM_KERNEL(rule, used, size)                                                        \
    extern "C" __global__ void __launch_bounds__(OF_CUDA_THREADS, OF_BLOCKS)                       \
        OF_CUDA_NAME(rule, used, size)(OF_CUDA_ARGUMENT(of_cuda_##size##_table) table) {           \
        of_run_block(table.common, table.words);                                                   \
    }
#define OF_PROGRAM_KERNELS(rule, used)                                                             \
    OF_PROGRAM_KERNEL(rule, used, small) OF_PROGRAM_KERNEL(rule, used, large)

OF_SETS(OF_PROGRAM_KERNELS, OF_RULE)
