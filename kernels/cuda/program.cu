// SPDX-License-Identifier: BSD-3-Clause
// program.cu: runs a program (../program.h) over many tensors in one launch, in the roundings
// of PyTorch's CUDA operators. The build compiles it once per dtype.
//
// Instructions lie before the tensors in the kernel's arguments, where all threads read one at
// a time without a cost. The registers that they name are rows of shared memory, as many as the
// program uses, of which a thread has a part that no other thread reads. Elements have the type of
// tensors there, to which every operator rounds: traffic to these rows is what bounds a program.
#include "block.cuh"

#ifdef __CUDACC__
#define OF_SHARED_ROWS(name) extern __shared__ of_vector name[]
#endif

enum {
    OF_PACK = OF_CUDA_ROW_PART / sizeof(of_real), // elements of a thread at once
    OF_ROW_VECTORS = OF_CUDA_PROGRAM_THREADS * OF_PACK / OF_LANES,
    OF_AT_ONCE = 5, // arrays that are on their way from memory together
    OF_INSTRUCTION_WORDS = sizeof(of_real) == 8 ? 3 : 2,
    OF_ALL_STATE = (1 << OF_MAX_STATE) - 1,
    OF_BLOCKS = 16 // that a multiprocessor has registers for
};
static_assert(OF_REGISTER_TEMPORARY % OF_AT_ONCE == 0, "no array is behind the last");

typedef of_pack<OF_LANES> of_vector; // neighbours in a row

// A thread's elements of one register.
struct of_row {
    of_real lane[OF_PACK];
};

// Vectors of one thread are as far apart as the block has threads: so these meet in no bank.
OF_DEVICE_FN of_vector *of_at(of_vector *rows, unsigned number) {
    return rows + number * OF_ROW_VECTORS;
}

// Widens bfloat16 within its word of two: one instruction each, where the compiler takes two.
OF_DEVICE_FN of_real of_widen_lane(const of_vector &vector, int lane) {
#if defined(OF_DTYPE_BFLOAT16) && defined(__CUDACC__)
    unsigned pair;
    memcpy(&pair, &vector.lane[lane & ~1], sizeof pair);
    return __uint_as_float(lane & 1 ? pair & 0xffff0000u : pair << 16);
#else
    return of_widen(vector.lane[lane]);
#endif
}

OF_DEVICE_FN of_row of_get(const of_vector *from) {
    of_row row;
#pragma unroll
    for (int lane = 0; lane < OF_PACK; lane += OF_LANES) {
        const of_vector vector = from[lane / OF_LANES * OF_CUDA_PROGRAM_THREADS];
#pragma unroll
        for (int i = 0; i < OF_LANES; i++)
            row.lane[lane + i] = of_widen_lane(vector, i);
    }
    return row;
}

// Narrows a number that is rounded already: of bfloat16 it is the upper half, with no conversion.
OF_DEVICE_FN of_stored of_kept(of_real rounded) {
#if !defined(OF_DTYPE_BFLOAT16)
    return of_narrow(rounded);
#elif defined(__CUDACC__)
    return static_cast<of_stored>(__float_as_uint(rounded) >> 16);
#else
    return static_cast<of_stored>(of_bits_of_float(rounded) >> 16);
#endif
}

OF_DEVICE_FN void of_put(of_vector *to, const of_row &row) {
#pragma unroll
    for (int lane = 0; lane < OF_PACK; lane++)
        to[lane / OF_LANES * OF_CUDA_PROGRAM_THREADS].lane[lane % OF_LANES] =
            of_kept(row.lane[lane]);
}

// The number that begins at this half of a word, or at this word.
OF_DEVICE_FN of_real of_number(const uint64_t *words, int which) {
    return reinterpret_cast<const of_real *>(words)[which];
}

// Each operator loads what it reads: all threads of a block go to the same one.
#define OF_OPERATOR(name, inputs, result)                                                          \
    case OF_OPERATOR_##name: {                                                                     \
        const of_row at_a = inputs > 0 ? of_get(from_a) : of_row();                                \
        const of_row at_b = inputs > 1 ? of_get(from_b) : of_row();                                \
        const of_row at_c = inputs > 2 ? of_get(from_c) : of_row();                                \
        _Pragma("unroll") for (int lane = 0; lane < OF_PACK; lane++) {                             \
            const of_real a = at_a.lane[lane], b = at_b.lane[lane], c = at_c.lane[lane];           \
            (void)a, (void)b, (void)c;                                                             \
            to.lane[lane] = result;                                                                \
        }                                                                                          \
        break;                                                                                     \
    }

OF_DEVICE_FN of_row of_operate(unsigned operation, const of_vector *from_a,
                               const of_vector *from_b, const of_vector *from_c, of_real s,
                               of_real t) {
    const of_form form = {true, false};
    of_row to = {};
    switch (operation) {
#include "../operators.def"
    default:
        break;
    }
    return to;
}

OF_DEVICE_FN void of_run(const uint64_t *word, unsigned code, of_vector *rows) {
#pragma unroll 1
    for (; code > 0; code--, word += OF_INSTRUCTION_WORDS) {
        const unsigned first = static_cast<unsigned>(*word);
        const unsigned second = static_cast<unsigned>(*word >> 32);
        const of_row to =
            of_operate(first & 255, of_at(rows, first >> 16 & 255), of_at(rows, first >> 24),
                       of_at(rows, second & 255), of_number(word + 1, 0), of_number(word + 1, 1));
        of_put(of_at(rows, first >> 8 & 255), to);
    }
}

// A block takes so many elements at once. A thread has N neighbours of them, the next N as far on
// as all threads have together, and so on. If N is more than 1 all threads have all of theirs.
struct of_place {
    uint64_t first; // of the tensor's elements
    unsigned n;
};

template <int N> OF_DEVICE_FN of_row of_load_row(const of_stored *from, const of_place &place) {
    of_row row;
    from += place.first + threadIdx.x * N;
#pragma unroll
    for (int lane = 0; lane < OF_PACK; lane += N) {
        const unsigned further = lane * OF_CUDA_PROGRAM_THREADS;
        of_pack<N> pack = {};
        if (N > 1 || threadIdx.x + further < place.n)
            pack = of_load<N>(from, further);
#pragma unroll
        for (int i = 0; i < N; i++)
            row.lane[lane + i] = of_widen(pack.lane[i]);
    }
    return row;
}

template <int N>
OF_DEVICE_FN void of_store_row(of_stored *to, const of_place &place, const of_row &row) {
    to += place.first + threadIdx.x * N;
#pragma unroll
    for (int lane = 0; lane < OF_PACK; lane += N) {
        const unsigned further = lane * OF_CUDA_PROGRAM_THREADS;
        of_pack<N> pack;
#pragma unroll
        for (int i = 0; i < N; i++)
            pack.lane[i] = of_narrow(row.lane[lane + i]);
        if (N > 1 || threadIdx.x + further < place.n)
            of_store<N>(to, further, pack);
    }
}

OF_DEVICE_FN void of_scale(of_row *grad, const of_factor &factor) {
    if (factor.given)
#pragma unroll
        for (int lane = 0; lane < OF_PACK; lane++)
            grad->lane[lane] = of_widen(of_narrow(grad->lane[lane] * factor.by));
}

// The address of an array: an entry begins with the addresses in the order of registers.
OF_DEVICE_FN of_stored *of_memory(const uint64_t *entry, int number) {
    return reinterpret_cast<of_stored *>(entry[number]);
}

template <int N>
OF_DEVICE_FN void of_load_rows(const of_cuda_common &common, const uint64_t *entry,
                               const of_place &place, of_vector *rows) {
#pragma unroll
    for (int first = 0; first < OF_REGISTER_TEMPORARY; first += OF_AT_ONCE) {
        if (!(common.reads >> first))
            return;
        of_row row[OF_AT_ONCE] = {};
#pragma unroll
        for (int i = 0; i < OF_AT_ONCE; i++)
            if (common.reads >> (first + i) & 1)
                row[i] = of_load_row<N>(of_memory(entry, first + i), place);
        if (first == 0 && common.reads >> OF_REGISTER_GRAD & 1)
            of_scale(&row[OF_REGISTER_GRAD], of_factor_of(common));
#pragma unroll
        for (int i = 0; i < OF_AT_ONCE; i++)
            if (common.reads >> (first + i) & 1)
                of_put(of_at(rows, first + i), row[i]);
    }
}

template <int N>
OF_DEVICE_FN void of_store_rows(const of_cuda_common &common, const uint64_t *entry,
                                const of_place &place, of_vector *rows) {
#pragma unroll
    for (int k = 0; k < OF_REGISTER_TEMPORARY; k++)
        if (common.writes >> k & 1)
            of_store_row<N>(of_memory(entry, k), place, of_get(of_at(rows, k)));
}

// One thread's part of a block. All threads go round as often: the last time some have none.
OF_DEVICE_FN void of_run_block(const of_cuda_common &common, const uint64_t *words,
                               of_vector *rows) {
    enum { ROUND = OF_CUDA_PROGRAM_THREADS * OF_PACK };
    const uint64_t *first = words + common.code * OF_INSTRUCTION_WORDS;
    const uint64_t *found = of_find<OF_ALL_STATE>(first, common.entries, blockIdx.x);
    const of_tensor tensor = of_unpack<OF_ALL_STATE>(found);
    const bool aligned = of_aligned<OF_ALL_STATE>(tensor, 16);
    const uint64_t begin = (blockIdx.x - tensor.first_block) * common.chunk;
    const uint64_t left = tensor.n - begin;
    const unsigned end = left < common.chunk ? static_cast<unsigned>(left) : common.chunk;
#pragma unroll 1
    for (unsigned at = 0; at < end; at += ROUND) {
        const of_place place = {begin + at, end - at};
        const bool packed = aligned && place.n >= ROUND;
        if (packed)
            of_load_rows<OF_LANES>(common, found, place, rows);
        else
            of_load_rows<1>(common, found, place, rows);
        of_run(words, common.code, rows);
        if (packed)
            of_store_rows<OF_LANES>(common, found, place, rows);
        else
            of_store_rows<1>(common, found, place, rows);
    }
}

// This thread's part of a row. The address is kept in a register: the compiler, which would make
// it again at each instruction of a program, does not see that it could.
OF_DEVICE_FN of_vector *of_my_part(of_vector *rows) {
    rows += threadIdx.x;
#ifdef __CUDA_ARCH__
    unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(rows));
    asm("" : "+r"(address));
    rows = static_cast<of_vector *>(__cvta_shared_to_generic(address));
#endif
    return rows;
}

#define OF_PROGRAM_KERNEL(rule, used, size)                                                        \
    extern "C" __global__ void __launch_bounds__(OF_CUDA_PROGRAM_THREADS, OF_BLOCKS)               \
        OF_CUDA_NAME(rule, used, size)(OF_CUDA_ARGUMENT(of_cuda_##size##_table) table) {           \
        OF_SHARED_ROWS(rows);                                                                      \
        of_run_block(table.common, table.words, of_my_part(rows));                                 \
    }
#define OF_PROGRAM_KERNELS(rule, used)                                                             \
    OF_PROGRAM_KERNEL(rule, used, small) OF_PROGRAM_KERNEL(rule, used, large)

OF_SETS(OF_PROGRAM_KERNELS, OF_RULE)
