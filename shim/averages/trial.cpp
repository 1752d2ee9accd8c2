// SPDX-License-Identifier: BSD-3-Clause
// trial.cpp: the program of an average beside PyTorch's operators, by bits.
#include <ATen/ops/empty.h>

#include <atomic>
#include <cstring>

#include "averages/averages.h"
#include "base/plain_mode.h"
#include "base/threads.h"
#include "base/trial_numbers.h"
#include "host/host.h"
#include "plan/refuse.h"

namespace optfuse {
namespace {

// Vectors and tails, whose scalar formula is that of the seams between PyTorch's threads, too. Few
// enough for one thread: in a forked child more may hang.
constexpr int64_t kLengths[] = {1, 7, 64, 1003, 20003};
// lerp takes another formula from 0.5 on.
constexpr double kTaken[] = {0.1, 1e-4, 0.75};
constexpr double kCounts[] = {2, 3, 1001};

// With zeros, and numbers that products make denormal or vanish.
at::Tensor numbers(int64_t n, uint64_t seed, at::ScalarType dtype) {
    const at::Tensor made = at::empty({n}, at::kFloat);
    Draws draws(seed);
    for (int64_t i = 0; i < n; i++) {
        const auto number = static_cast<float>(draws.next());
        const float small = i % 37 == 3 ? 1e-38f : 1.0f;
        made.mutable_data_ptr<float>()[i] = i % 31 == 5 ? -0.0f : number * small;
    }
    return made.to(dtype);
}

void run_program(const Program &program, const at::Tensor &average, const at::Tensor &param,
                 of_dtype dtype) {
    of_plan_options options = {};
    fill_reference(&options);
    const of_program *core = &program.core;
    const size_t bytes = options.vector_bytes ? options.vector_bytes : 32;
    const auto n = static_cast<size_t>(average.numel());
    of_span span = {};
    span.param = average.mutable_data_ptr();
    span.grad = param.const_data_ptr();
    span.n = n;
    span.tail = of_tail(of_rule_find("programs"), options.reference, dtype, bytes, n);
    of_kernel_find("programs", options.reference, dtype, OF_CPU, of_isa_detect())->run(&span, &core);
}

bool is_equal(const Averaging &how, int64_t n, at::ScalarType type, of_dtype dtype) {
    const at::Tensor ours = numbers(n, 1, type), theirs = ours.clone(), param = numbers(n, 2, type);
    run_program(*program_of(how), ours, param, dtype);
    average_by_operators({theirs}, {param}, how);
    return std::memcmp(ours.const_data_ptr(), theirs.const_data_ptr(), ours.nbytes()) == 0;
}

bool are_all_equal(Formula formula, at::ScalarType type) {
    const PlainMode plain;
    of_dtype dtype;
    if (!dtype_of(at::empty({1}, type).unsafeGetTensorImpl(), &dtype))
        return false;
    for (const double taken : formula == Formula::MEAN ? kCounts : kTaken)
        for (const int64_t n : kLengths)
            if (!is_equal({formula, 1 - taken, taken}, n, type, dtype))
                return false;
    return true;
}

enum : int { NOT_TRIED, ALIKE, OTHERWISE };

// Two threads may try the same at once, and find the same.
std::atomic<int> verdicts[static_cast<size_t>(Formula::COUNT)]
                         [static_cast<size_t>(at::ScalarType::NumOptions)];

} // namespace

bool is_averaged_alike(const Averaging &how, at::ScalarType dtype) {
    std::atomic<int> &verdict =
        verdicts[static_cast<size_t>(how.formula)][static_cast<size_t>(dtype)];
    if (verdict == NOT_TRIED)
        on_another_thread([&verdict, formula = how.formula, dtype] {
            verdict = are_all_equal(formula, dtype) ? ALIKE : OTHERWISE;
        });
    return verdict == ALIKE;
}

} // namespace optfuse
