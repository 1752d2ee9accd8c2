// SPDX-License-Identifier: BSD-3-Clause
// bytes_alone.cpp: the least that fusion can cost in training. It moves the bytes of an update
// (moves.c) where fusion would update, and frees the gradient. It computes nothing and checks
// nothing; it uses the same store policy as fusion (plugin/store_policy.h).
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/custom_class.h>

#include <memory>
#include <utility>
#include <vector>

#include "store_policy.h"

extern "C" void moves(const void *gradient, void *param, void *const *state, size_t n_state,
                      size_t begin, size_t end, bool past_caches); // moves.c

namespace {

using Tensors = std::vector<at::Tensor>;

constexpr int64_t kLine = 64;
constexpr int64_t kSerialLines = 1024; // 16,384 elements of float32: fewer stay on one thread

// The bytes of one update: of a parameter and at most two tensors of its size. All are
// contiguous, and the parameter starts on a cache line.
struct Bytes {
    const void *gradient;
    void *param;
    void *state[2];
    size_t n_state;
    int64_t lines;
};

Bytes bytes_of(const at::Tensor &param, const Tensors &state, const at::Tensor &grad) {
    Bytes bytes = {grad.const_data_ptr(), param.mutable_data_ptr(), {}, state.size(),
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

struct Slot {
    at::Tensor param;
    Tensors state;
    at::Tensor grad; // waits for the parameter's next use, in forward
};

// The parameters of one model.
struct Floor : torch::CustomClassHolder {
    Floor() { of_store_policy_init(&store_policy); }
    int64_t add(const at::Tensor &param, Tensors state);
    void update_in_backward();
    void take(); // forward: takes the gradients from the parameters
    int64_t address() { return reinterpret_cast<int64_t>(this); }

    std::vector<Slot> slots;
    of_store_policy store_policy;
};

struct Hook final : torch::autograd::PostAccumulateGradHook {
    Hook(c10::intrusive_ptr<Floor> of, size_t at) : floor(std::move(of)), slot(at) {}
    void operator()(const at::Tensor &param) override {
        Bytes bytes = bytes_of(param, floor->slots[slot].state, param.grad());
        if (at::get_num_threads() == 1 || bytes.lines <= kSerialLines)
            move(bytes, 0, bytes.lines, false);
        else
            of_store_policy_run(
                &floor->store_policy, bytes.lines,
                [](void *of, int64_t begin, int64_t end, bool past_caches) {
                    move(*static_cast<const Bytes *>(of), begin, end, past_caches);
                },
                &bytes);
        param.mutable_grad().reset();
    }
    c10::intrusive_ptr<Floor> floor;
    size_t slot;
};

// Returns the parameter's number.
int64_t Floor::add(const at::Tensor &param, Tensors state) {
    TORCH_CHECK(param.is_cpu() && param.is_contiguous() && state.size() <= 2);
    TORCH_CHECK(reinterpret_cast<uintptr_t>(param.const_data_ptr()) % kLine == 0);
    slots.push_back({param, std::move(state), {}});
    return static_cast<int64_t>(slots.size()) - 1;
}

// From now on moves the bytes in each parameter's gradient hook. It has no such hook yet.
void Floor::update_in_backward() {
    auto self = c10::intrusive_ptr<Floor>::reclaim_copy(this);
    for (size_t i = 0; i < slots.size(); i++)
        torch::autograd::impl::set_post_acc_grad_hooks(slots[i].param,
                                                       std::make_unique<Hook>(self, i));
}

void Floor::take() {
    for (Slot &slot : slots)
        if (slot.param.grad().defined())
            slot.grad = std::move(slot.param.mutable_grad());
}

} // namespace

TORCH_LIBRARY(optfuse_floor, library) {
    library.class_<Floor>("Floor")
        .def(torch::init<>())
        .def("add", &Floor::add)
        .def("update_in_backward", &Floor::update_in_backward)
        .def("address", &Floor::address)
        .def("take", &Floor::take);
}

// Forward: moves the bytes of those parameters in [begin, end) whose gradient was taken. Called
// by name, because a method of a class of PyTorch's takes longer than some updates.
extern "C" __attribute__((visibility("default"))) void
bytes_alone_update(int64_t floor, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
        Slot &slot = reinterpret_cast<Floor *>(floor)->slots[static_cast<size_t>(i)];
        if (!slot.grad.defined())
            continue;
        const Bytes bytes = bytes_of(slot.param, slot.state, slot.grad);
        move(bytes, 0, bytes.lines, false);
        slot.grad.reset();
    }
}
