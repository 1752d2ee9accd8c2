// SPDX-License-Identifier: BSD-3-Clause
// bytes_alone.cpp: the least that fusion can cost in training. It moves the bytes of an
// update (moves.c) where fusion would update, and frees the gradient; it computes nothing,
// checks nothing and remembers nothing.
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <memory>
#include <utility>
#include <vector>

#include "moves.h"

namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kSerialLines = 1024; // 16,384 elements of float32

// A parameter and its state: at most two tensors of its size. All are contiguous, and the
// gradient is.
struct Arrays {
    at::Tensor param;
    std::vector<at::Tensor> state;
    at::Tensor grad; // that waits for the parameter's next use
};

void move(const at::Tensor &param, const std::vector<at::Tensor> &state, const at::Tensor &grad,
          bool past_caches) {
    void *arrays[2] = {nullptr, nullptr};
    for (size_t k = 0; k < state.size(); k++)
        arrays[k] = state[k].mutable_data_ptr();
    const void *gradient = grad.const_data_ptr();
    void *to = param.mutable_data_ptr();
    const int64_t lines = static_cast<int64_t>(param.nbytes()) / kLine;
    at::parallel_for(0, lines, kSerialLines, [&](int64_t begin, int64_t end) {
        moves(gradient, to, arrays, state.size(), static_cast<size_t>(begin),
              static_cast<size_t>(end), past_caches);
    });
}

struct Hook final : torch::autograd::PostAccumulateGradHook {
    explicit Hook(std::vector<at::Tensor> of) : state(std::move(of)) {}
    void operator()(const at::Tensor &param) override {
        move(param, state, param.grad(), true);
        param.mutable_grad().reset();
    }
    std::vector<at::Tensor> state;
};

void check(const at::Tensor &param, const std::vector<at::Tensor> &state) {
    TORCH_CHECK(param.is_cpu() && param.is_contiguous() && state.size() <= 2);
    TORCH_CHECK(reinterpret_cast<uintptr_t>(param.const_data_ptr()) % kLine == 0);
}

// In forward. Those that are gone leave an empty place.
std::vector<Arrays> &all_arrays() {
    static auto *const all = new std::vector<Arrays>; // Python may end before what it holds
    return *all;
}

Arrays &arrays_at(int64_t i) { return all_arrays()[static_cast<size_t>(i)]; }

// In backward: at once. The parameter has no such hook yet.
void attach(const at::Tensor &param, std::vector<at::Tensor> state) {
    check(param, state);
    torch::autograd::impl::set_post_acc_grad_hooks(param,
                                                   std::make_unique<Hook>(std::move(state)));
}

// In forward: its number for the functions below.
int64_t add(const at::Tensor &param, std::vector<at::Tensor> state) {
    check(param, state);
    all_arrays().push_back({param, std::move(state), {}});
    return static_cast<int64_t>(all_arrays().size()) - 1;
}

} // namespace

TORCH_LIBRARY(optfuse_floor, library) {
    library.def("attach", attach);
    library.def("add", add);
}

#define EXPORT extern "C" __attribute__((visibility("default")))

// Each of [begin, end): keeps the gradient beyond zero_grad().
EXPORT void bytes_alone_keep(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
        arrays_at(i).grad = arrays_at(i).param.grad();
}

// Moves the bytes of those that have a gradient.
EXPORT void bytes_alone_move(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
        Arrays &one = arrays_at(i);
        if (one.grad.defined())
            move(one.param, one.state, one.grad, false);
        one.grad.reset();
    }
}

EXPORT void bytes_alone_drop(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
        arrays_at(i) = {};
}
