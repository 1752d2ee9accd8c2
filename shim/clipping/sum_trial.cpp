// SPDX-License-Identifier: BSD-3-Clause
// sum_trial.cpp: whether norms by our sums (sums.cpp) have the bits of PyTorch's operator.
#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <numeric>
#include <optional>

#include "clipping/pending.h"
#include "guard.h"
#include "tensor/parallel.h"
#include "tensor/plain_mode.h"
#include "tensor/threads.h"
#include "tensor/trial_numbers.h"

namespace optfuse {
namespace {

// The numbers of squares that compilers round together, where they do not fill a vector.
constexpr size_t kRoundedBy[] = {2, 1, 0, 4, 8};

constexpr at::ScalarType kTypes[OF_DTYPE_COUNT] = {at::kFloat, at::kDouble, at::kBFloat16,
                                                   at::kHalf};

// Numbers of 16 bits whose norm lies halfway between two others, and one that vanishes if it is added
// behind the first of them, and tips the norm over if some are added up elsewhere: else another order
// would not show in so short a result.
struct Balanced {
    std::vector<double> numbers;
    double tips;
};

Balanced balanced(of_dtype dtype, of_terms terms) {
    if (terms == OF_MAGNITUDES)
        return {{1, dtype == OF_BFLOAT16 ? 0x1p-8 : 0x1p-11}, 0x1p-24};
    if (dtype == OF_BFLOAT16)
        return {{1, 22 / 256.0, 5 / 256.0, 2 / 256.0}, 0x1p-12};
    return {{1, 64 / 2048.0, 1 / 2048.0}, 0x1p-12};
}

size_t drawn_below(Draws &draws, size_t n) {
    return static_cast<size_t>((draws.next() + 1) / 2 * static_cast<double>(n)) % n;
}

// The first number first, or anywhere; what tips in some lanes, of as many as there may be.
void fill_balanced(double *numbers, size_t n, const Balanced &with, Draws &draws) {
    const size_t apart = size_t{1} << drawn_below(draws, 6);
    for (size_t i = drawn_below(draws, apart); i < n; i += apart)
        numbers[i] = with.tips;
    const size_t first = drawn_below(draws, 2) * drawn_below(draws, n);
    for (size_t i = 0; i < with.numbers.size(); i++)
        numbers[(first + i * (1 + apart)) % n] = with.numbers[i];
}

// The squares of bfloat16 are exact but where they vanish.
double drawn_number(of_dtype dtype, Draws &draws) {
    return draws.next() * (dtype == OF_BFLOAT16 ? 3e-21 : 1);
}

void fill_numbers(double *numbers, size_t n, of_dtype dtype, of_terms terms, Draws &draws) {
    const bool is_narrow = dtype == OF_BFLOAT16 || dtype == OF_FLOAT16;
    if (is_narrow && drawn_below(draws, 4) != 0)
        return fill_balanced(numbers, n, balanced(dtype, terms), draws);
    for (size_t i = 0; i < n; i++)
        numbers[i] = drawn_number(dtype, draws);
}

// Arrays, and their norms by PyTorch's operator.
struct SumTrial {
    std::vector<at::Tensor> memory, norms;
    std::vector<Array> arrays;
    std::vector<double> theirs() const {
        const at::Tensor all = at::cat(norms).to(at::kDouble);
        const auto *numbers = all.const_data_ptr<double>();
        return {numbers, numbers + all.numel()};
    }
};

// Each length up to some vectors and a tail; longer ones; and more than PyTorch adds on one thread.
void add_lengths(SumTrial &trial, of_dtype dtype, of_terms terms, Draws &draws) {
    std::vector<int64_t> lengths{64,  100, 130, 200,  257,  300,
                                 400, 511, 777, 1000, 1007, thread_count() > 1 ? 33333 : 2000};
    for (int64_t n = 1; n < 48; n++)
        lengths.push_back(n);
    const int64_t total = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    const at::Tensor numbers = at::zeros({total}, at::kDouble);
    int64_t begin = 0;
    for (const int64_t n : lengths) {
        fill_numbers(numbers.mutable_data_ptr<double>() + begin, static_cast<size_t>(n), dtype,
                     terms, draws);
        begin += n;
    }
    for (const at::Tensor &tensor : numbers.to(kTypes[dtype]).split_with_sizes(lengths)) {
        trial.memory.push_back(tensor);
        trial.arrays.push_back({tensor.const_data_ptr(), tensor.numel()});
        trial.norms.push_back(
            at::linalg_vector_norm(tensor, terms == OF_SQUARES ? 2 : 1).view({1}));
    }
}

// Each tail of many arrays: another rounding in it does not show in every norm.
void add_tails(SumTrial &trial, of_dtype dtype, Draws &draws) {
    constexpr int64_t kRows = 64, kMost = 24, kAlong[] = {1};
    const at::Tensor numbers = at::zeros({kRows, kMost}, at::kDouble);
    for (int64_t i = 0; i < kRows * kMost; i++)
        numbers.mutable_data_ptr<double>()[i] = drawn_number(dtype, draws);
    const at::Tensor rows = numbers.to(kTypes[dtype]);
    const auto *first = static_cast<const char *>(rows.const_data_ptr());
    const auto bytes = static_cast<int64_t>(of_dtype_size(dtype));
    trial.memory.push_back(rows);
    for (int64_t n = 2; n < kMost; n++) {
        trial.norms.push_back(
            at::linalg_vector_norm(rows.narrow(1, 0, n), 2, at::IntArrayRef(kAlong)));
        for (int64_t row = 0; row < kRows; row++)
            trial.arrays.push_back({first + row * kMost * bytes, n});
    }
}

// The place in kRoundedBy of the first that has the bits of PyTorch's operator, and 1; 0: none has.
size_t find_rounding(of_dtype dtype, of_terms terms) {
    SumTrial trial;
    Draws draws;
    add_lengths(trial, dtype, terms, draws);
    if (terms == OF_SQUARES && dtype != OF_FLOAT16)
        add_tails(trial, dtype, draws);
    const std::vector<double> theirs = trial.theirs();
    for (size_t i = 0; i < std::size(kRoundedBy); i++)
        if (norms_of_arrays(trial.arrays, dtype, terms, kRoundedBy[i]) == theirs ||
            !OF_GUARD(norm))
            return i + 1;
    return 0;
}

// The number of threads when it was tried, and behind that what find_rounding() found.
std::atomic<size_t> sum_verdicts[OF_DTYPE_COUNT][OF_TERMS_COUNT];
constexpr size_t kFindings = 8;

} // namespace

std::optional<size_t> rounded_in_order(of_dtype dtype, of_terms terms) {
    std::atomic<size_t> &verdict = sum_verdicts[dtype][terms];
    const auto threads = static_cast<size_t>(thread_count());
    if (verdict / kFindings != threads) {
        if (of_is_forked() && threads > 1)
            return std::nullopt; // as of norms_are_torchs()
        on_another_thread([&verdict, threads, dtype, terms] {
            const PlainMode plain;
            verdict = threads * kFindings + find_rounding(dtype, terms);
        });
    }
    const size_t found = verdict % kFindings;
    return found == 0 ? std::nullopt : std::optional<size_t>(kRoundedBy[found - 1]);
}

} // namespace optfuse
