// SPDX-License-Identifier: BSD-3-Clause
// bytes_alone.cpp: the least that fusion can cost in training. It moves the bytes of an
// update (moves.c) where fusion would update, and frees the gradient; it computes nothing,
// checks nothing and remembers nothing but, as fusion, which kind of stores is faster.
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <memory>
#include <utility>
#include <vector>

#include "moves.h"
#include "store_policy.h"

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

// The bytes of one update.
struct Bytes {
    const void *gradient;
    void *param;
    void *state[2];
    size_t n_state;
    int64_t lines;
};

Bytes bytes_of(const at::Tensor &param, const std::vector<at::Tensor> &state,
               const at::Tensor &grad) {
    Bytes bytes = {grad.const_data_ptr(),
                   param.mutable_data_ptr(),
                   {},
                   state.size(),
                   static_cast<int64_t>(param.nbytes()) / kLine};
    for (size_t k = 0; k < state.size(); k++)
        bytes.state[k] = state[k].mutable_data_ptr();
    return bytes;
}

void move(const Bytes &bytes, int64_t from, int64_t to, bool past_caches) {
    at::parallel_for(from, to, kSerialLines, [&](int64_t begin, int64_t end) {
        moves(bytes.gradient, bytes.param, bytes.state, bytes.n_state, static_cast<size_t>(begin),
              static_cast<size_t>(end), past_caches);
    });
}

of_store_policy store_policy; // of the hooks that were attached last

void move_in_backward(Bytes bytes) {
    if (at::get_num_threads() == 1 || bytes.lines <= kSerialLines)
        move(bytes, 0, bytes.lines, false);
    else
        of_store_policy_run(
            &store_policy, bytes.lines,
            [](void *of, int64_t begin, int64_t end, bool past_caches) {
                move(*static_cast<const Bytes *>(of), begin, end, past_caches);
            },
            &bytes);
}

struct Hook final : torch::autograd::PostAccumulateGradHook {
    explicit Hook(std::vector<at::Tensor> of) : state(std::move(of)) {}
    void operator()(const at::Tensor &param) override {
        move_in_backward(bytes_of(param, state, param.grad()));
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

Arrays &arrays_at(int64_t i) {
    return all_arrays()[static_cast<size_t>(i)];
}

// Another model's hooks come next: they find out anew which stores are faster.
void begin() {
    of_store_policy_init(&store_policy);
}

// In backward: at once. The parameter has no such hook yet.
void attach(const at::Tensor &param, std::vector<at::Tensor> state) {
    check(param, state);
    torch::autograd::impl::set_post_acc_grad_hooks(param, std::make_unique<Hook>(std::move(state)));
}

// In forward: its number for the functions below.
int64_t add(const at::Tensor &param, std::vector<at::Tensor> state) {
    check(param, state);
    all_arrays().push_back({param, std::move(state), {}});
    return static_cast<int64_t>(all_arrays().size()) - 1;
}

} // namespace

TORCH_LIBRARY(optfuse_floor, library) {
    library.def("begin", begin);
    library.def("attach", attach);
    library.def("add", add);
}

#define EXPORT extern "C" __attribute__((visibility("default")))

// Each of [begin, end): takes the gradient from its parameter.
EXPORT void bytes_alone_take(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
        if (arrays_at(i).param.grad().defined())
            arrays_at(i).grad = std::move(arrays_at(i).param.mutable_grad());
}

// Moves the bytes of those that have a gradient.
EXPORT void bytes_alone_move(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
        Arrays &one = arrays_at(i);
        if (one.grad.defined()) {
            const Bytes bytes = bytes_of(one.param, one.state, one.grad);
            move(bytes, 0, bytes.lines, false);
        }
        one.grad.reset();
    }
}

EXPORT void bytes_alone_drop(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
        arrays_at(i) = {};
}
