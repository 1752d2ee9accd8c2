// SPDX-License-Identifier: BSD-3-Clause
// norm_trial.cpp: whether our norms have the bits of PyTorch's operator: some thousands of short
// norms, less than 2.8 million instructions.
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <atomic>

#include "base/parallel.h"
#include "base/plain_mode.h"
#include "base/threads.h"
#include "base/trial_numbers.h"
#include "clipping/pending.h"
#include "guard.h"

namespace optfuse {
namespace {

at::Tensor random_numbers(int64_t n, float spread) {
    at::Tensor numbers = at::empty({n}, at::kFloat);
    float *const at = numbers.mutable_data_ptr<float>();
    Draws draws;
    for (int64_t i = 0; i < n; i++)
        at[i] = static_cast<float>(draws.next()) * spread;
    return numbers;
}

// On this thread alone: which one computes a norm changes no bit of ours.
std::vector<of_norm> our_norms(of_norm_fn *norm, const float *numbers,
                               const std::vector<int64_t> &lengths, int64_t apart) {
    std::vector<of_norm> items;
    std::vector<of_norm *> all;
    for (size_t i = 0; i < lengths.size(); i++)
        items.push_back({numbers + static_cast<int64_t>(i) * apart,
                         static_cast<size_t>(lengths[i]),
                         {1, 1},
                         0,
                         true,
                         nullptr});
    for (of_norm &item : items)
        all.push_back(&item);
    norm(all.data(), all.size());
    return items;
}

bool are_equal(of_norm_fn *norm, float spread, const std::vector<int64_t> &lengths) {
    const at::Tensor numbers = random_numbers(lengths.back(), spread);
    const std::vector<of_norm> ours = our_norms(norm, numbers.const_data_ptr<float>(), lengths, 0);
    std::vector<at::Tensor> tensors;
    for (const int64_t n : lengths)
        tensors.push_back(numbers.narrow(0, 0, n));
    const std::vector<at::Tensor> theirs = at::_foreach_norm(tensors, 2);
    for (size_t i = 0; i < lengths.size(); i++)
        if (at::linalg_vector_norm(tensors[i], 2).item<float>() != ours[i].norm ||
            theirs[i].item<float>() != ours[i].norm)
            return false;
    return true;
}

// Each tail of many arrays: another rounding in it does not show in every norm.
bool are_tails_equal(of_norm_fn *norm) {
    constexpr int64_t kTailRows = 64, kLongest = 24, kDim[] = {1};
    const at::Tensor numbers = random_numbers(kTailRows * kLongest, 1);
    for (int64_t n = 2; n < kLongest; n++) {
        const at::Tensor rows = numbers.view({kTailRows, kLongest}).narrow(1, 0, n);
        const at::Tensor theirs = at::linalg_vector_norm(rows, 2, at::IntArrayRef(kDim));
        const std::vector<of_norm> ours = our_norms(
            norm, numbers.const_data_ptr<float>(), std::vector<int64_t>(kTailRows, n), kLongest);
        for (size_t row = 0; row < ours.size(); row++)
            if (theirs.const_data_ptr<float>()[row] != ours[row].norm)
                return false;
    }
    return true;
}

bool has_bits_of_torch(of_norm_fn *norm) {
    constexpr float kVanishes = 1e-30f; // when it is squared
    // Short ones; vectors and a tail; and more than PyTorch computes on one thread.
    const std::vector<int64_t> lengths{1,  2,  3,    4,    7,    8,    9,    15,
                                       16, 39, 1000, 1001, 1006, 1007, 5000, 33333};
    return are_tails_equal(norm) && are_equal(norm, 1, lengths) &&
           are_equal(norm, kVanishes, {1, 3, 5, 39, 1007});
}

// The first order that has the bits of PyTorch's operator; null: none has.
of_norm_fn *find_order() {
    for (size_t order = 0; of_norm_orders[order] != nullptr; order++) {
        of_norm_fn *norm = of_norm_find(order, of_isa_detect());
        if (has_bits_of_torch(norm) || !OF_GUARD(norm))
            return norm;
    }
    return nullptr;
}

std::atomic<int> tried_with{0}; // threads
std::atomic<bool> found_equal{false};
std::atomic<of_norm_fn *> in_order{nullptr}; // the last that was found

} // namespace

bool norms_are_torchs() {
    if (tried_with != thread_count()) {
        if (of_is_forked() && thread_count() > 1)
            return false; // PyTorch's threads, which the trial would ask for, may hang here
        of_norm_fn *norm = nullptr;
        on_another_thread([&norm] {
            const PlainMode plain;
            norm = find_order();
        });
        found_equal = norm != nullptr;
        if (norm != nullptr)
            in_order = norm;
        tried_with = thread_count();
    }
    return found_equal;
}

of_norm_fn *norm_in_order() { return in_order; }

NormsTried norms_tried() {
    if (tried_with == 0)
        return NormsTried::NOT_YET;
    return found_equal ? NormsTried::EQUAL : NormsTried::DIFFERENT;
}

} // namespace optfuse
