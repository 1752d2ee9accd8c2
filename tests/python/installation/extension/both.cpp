// SPDX-License-Identifier: BSD-3-Clause
// both.cpp: an extension of Python whose C++ trains with optfuse.hpp. Handles are addresses.
#include <torch/library.h>

#include <optfuse/optfuse.hpp>

namespace {

struct Both {
    Both(std::vector<at::Tensor> params, double lr, optfuse::Mode mode)
        : opt(std::move(params), torch::optim::AdamWOptions(lr)), fused(optfuse::fuse(opt, mode)) {}
    torch::optim::AdamW opt;
    optfuse::Fused fused;
};

Both &at_address(int64_t handle) {
    return *reinterpret_cast<Both *>(handle);
}

int64_t fuse(std::vector<at::Tensor> params, double lr, bool backward) {
    const auto mode = backward ? optfuse::Mode::backward : optfuse::Mode::forward;
    return reinterpret_cast<int64_t>(new Both(std::move(params), lr, mode));
}

} // namespace

TORCH_LIBRARY(both, m) {
    m.def("fuse(Tensor[] params, float lr, bool backward) -> int", fuse);
    m.def("step(int it) -> ()", [](int64_t it) { at_address(it).fused.step(); });
    m.def("zero_grad(int it) -> ()", [](int64_t it) { at_address(it).fused.zero_grad(); });
    m.def("pending(int it) -> int", [](int64_t it) {
        return static_cast<int64_t>(at_address(it).fused.counts().pending);
    });
    m.def("free(int it) -> ()", [](int64_t it) { delete &at_address(it); });
}
