// SPDX-License-Identifier: BSD-3-Clause
// cxx.cpp: optfuse.hpp on the played GPU, in a process without Python: weights and state must have
// the bits that PyTorch's operators give there, without a race. A part of the program test_cxx:
//   test_cxx device LIBRARY_OF_THE_DEVICE LIBRARY_OF_ITS_KERNELS
// The bits are those of the machine's own GPU with
//   test_cxx cuda
#include "optfuse.hpp"

#include "../cxx/common.h"
#include "../cxx/reference.h"
#include "../cxx/tests.h"
#include "watch.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <cmath>
#include <cstdlib>

namespace on_gpu {
namespace {

using optfuse::Mode;
using torch::Tensor;

torch::Device gpu(torch::kPrivateUse1, 0);

template <typename Answer, typename... Given> Answer ask(const char *op, Given... given) {
    const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(op, "");
    return handle.typed<Answer(Given...)>().call(given...);
}

void *opened(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(library != nullptr, dlerror());
    return library;
}

// As fakecuda.py.
void load_gpu(const char *device, const char *kernels) {
    opened(device);
    c10::register_privateuse1_backend("fakecuda");
    const auto watch = reinterpret_cast<decltype(&fake_optfuse_watch)>(
        dlsym(opened(kernels), "fake_optfuse_watch"));
    const auto watcher = ask<std::vector<int64_t>>("fakecuda::watcher");
    watch(reinterpret_cast<fake_launched *>(watcher[0]),
          reinterpret_cast<fake_graph_of *>(watcher[1]),
          reinterpret_cast<fake_device_now *>(watcher[2]),
          reinterpret_cast<fake_keep *>(watcher[3]));
}

std::vector<Tensor> params_of(at::ScalarType dtype) {
    at::Generator seeded = at::detail::getDefaultCPUGenerator(); // the device has none
    seeded.set_current_seed(3);
    std::vector<Tensor> params;
    for (const int64_t size : {40, 7, 1003, 20000})
        params.push_back(torch::randn({size}).to(gpu, dtype).requires_grad_());
    return params;
}

void backward(const std::vector<Tensor> &params) {
    Tensor loss = torch::zeros({}, params[0].options());
    for (const Tensor &p : params)
        loss = loss + (p * p).sum();
    loss.backward();
}

bool same(const Tensor &a, const Tensor &b) {
    return a.defined() == b.defined() && (!a.defined() || same_bits(a.cpu(), b.cpu()));
}

template <typename Rule> void train(const std::string &name, Mode mode, at::ScalarType dtype) {
    const bool in_backward = mode == Mode::backward;
    const std::string what = name + " on the GPU, updates in " +
                             (in_backward ? "backward, " : "step(), ") + c10::toString(dtype);
    const std::vector<Tensor> params = params_of(dtype), expected = params_of(dtype);
    typename Rule::Class opt(params, Rule::options());
    optfuse::Options options;
    options.mode = mode;
    options.strict = true;
    optfuse::Fused fused = optfuse::fuse(opt, options);
    std::vector<typename Rule::Entry> entries(expected.size());
    const Tensor none = torch::zeros({}, torch::TensorOptions(gpu));
    std::vector<Tensor> counters;
    for (size_t i = 0; i < expected.size(); i++)
        counters.push_back(none.clone());
    uint64_t inside = 0, pending = 0;
    for (int step = 0; step < 8; step++) {
        fused.zero_grad();
        const uint64_t before = fused.counts().created;
        backward(params);
        inside += fused.counts().created - before;
        fused.step();
        pending += fused.counts().pending;
        for (const Tensor &p : expected)
            p.mutable_grad() = Tensor();
        backward(expected);
        const torch::NoGradGuard no_grad;
        for (size_t i = 0; i < expected.size(); i++)
            Rule::update(expected[i], expected[i].grad(), Rule::options(), entries[i], counters[i]);
    }
    expect(inside == (in_backward ? 32 : 0) && pending == 0,
           what + ": updates run there, " + std::to_string(inside) + " inside, " +
               std::to_string(pending) + " pending");
    if (!in_backward)
        expect(fused.counts().launches == 8, what + ": those of a step go in one launch");
    fused.flush();
    for (size_t i = 0; i < params.size(); i++) {
        const std::string of = what + ", parameter " + std::to_string(i);
        expect(same(params[i], expected[i]), of + " has the bits of the reference");
        auto &entry = static_cast<typename Rule::Entry &>(
            *opt.state().at(params[i].unsafeGetTensorImpl()));
        const auto x = Rule::tensors(entry), y = Rule::tensors(entries[i]);
        for (size_t k = 0; k < x.size(); k++)
            expect(same(*x[k], *y[k]), of + ", state " + std::to_string(k) + " has its bits");
        if constexpr (!std::is_same_v<Rule, reference::SGD>)
            expect(entry.step() == 8, of + " is counted");
    }
}

template <typename Rule> void all(const std::string &name) {
    for (const auto mode : {Mode::forward, Mode::backward})
        for (const auto dtype : {torch::kFloat32, torch::kFloat64, torch::kBFloat16, torch::kHalf})
            train<Rule>(name, mode, dtype);
}

struct Centered : reference::RMSprop {
    static Options options() { return others(); }
};

Tensor weights() {
    return torch::ones({3, 4}, torch::TensorOptions(gpu)).requires_grad_();
}

// A CUDA graph reads the weights, captured before the optimizer is fused or with nothing pending;
// replayed after a step() the graph finds what lies at their address.
void replay(bool is_captured_before) {
    const std::string when = is_captured_before ? "before" : "after";
    const Tensor w = weights();
    Tensor captured;
    const auto capture = [&] {
        const c10::impl::VirtualGuardImpl device(gpu.type());
        device.synchronizeDevice(gpu.index());
        const c10::Stream stream = device.getStream(gpu);
        ask<void, c10::Stream, int64_t>("fakecuda::set_capture", stream, 7);
        (w * w).sum();
        captured = torch::from_blob(w.data_ptr(), w.sizes(), w.options().requires_grad(false));
        ask<void, c10::Stream, int64_t>("fakecuda::set_capture", stream, 0);
    };
    if (is_captured_before)
        capture();
    torch::optim::SGD opt({w}, torch::optim::SGDOptions(0.25));
    optfuse::Fused fused = optfuse::fuse(opt);
    for (int step = 0; step < 2; step++) {
        fused.zero_grad();
        backward({w});
        fused.step();
        if (step == 0 && !is_captured_before)
            capture();
    }
    expect(same(captured.clone(), torch::full_like(w, 0.25)),
           "a graph captured " + when + " fuse() reads the weights of the last step()");
}

void refuse() {
    const Tensor w = weights();
    torch::optim::AdamW opt({w});
    optfuse::Fused fused = optfuse::fuse(opt);
    const torch::Device other(torch::kPrivateUse1, 1);
    w.set_data(w.detach().to(other));
    w.mutable_grad() = torch::ones({3, 4}, torch::TensorOptions(other));
    expect_error("a parameter that has moved", "but was float32 on fakecuda:0 when",
                 [&] { fused.step(); });
}

// In the place of the reference.
double factor = 1.0;

void other_sgd(at::TensorList params, at::TensorList grads, at::TensorList, double, double,
               double lr, double, bool, bool, bool, const std::optional<Tensor> &,
               const std::optional<Tensor> &) {
    for (size_t i = 0; i < params.size(); i++)
        params[i].sub_(grads[i].mul(lr)).mul_(factor);
}

std::vector<Tensor> other_roots(at::TensorList of) {
    std::vector<Tensor> roots;
    for (const Tensor &one : of)
        roots.push_back(one.sqrt().mul_(factor));
    return roots;
}

// The trial must see another rounding, which is refused if strict, and a wrong update.
template <typename Class> void try_kernels(const std::string &name) {
    optfuse::Options strict;
    strict.strict = true;
    factor = 1.0 + 3e-7;
    Class rounds({weights()}, 0.1);
    expect_error(name + " with another rounding",
                 "Options::strict, but the update of parameter 0 of group 0",
                 [&] { optfuse::fuse(rounds, strict); });
    optfuse::fuse(rounds);
    factor = 1.001;
    Class wrong({weights().to(torch::kFloat64).detach().requires_grad_()}, 0.1);
    expect_error(name + " with a wrong update", "far more than rounding; nothing was fused",
                 [&] { optfuse::fuse(wrong); });
}

void try_all_kernels() {
    torch::Library other(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__,
                         __LINE__);
    other.impl("_fused_sgd_", other_sgd);
    other.impl("_foreach_sqrt", other_roots);
    try_kernels<torch::optim::SGD>("SGD");
    try_kernels<torch::optim::RMSprop>("RMSprop");
    try_kernels<torch::optim::Adagrad>("Adagrad");
    const auto options = torch::optim::RMSpropOptions(0.1).weight_decay(INFINITY);
    torch::optim::RMSprop infinite({weights()}, options);
    expect_error("a trial of NaN alone", "nothing but NaN and compared nothing",
                 [&] { optfuse::fuse(infinite); });
}

void train_all() {
    all<reference::AdamW>("AdamW");
    all<reference::Adam>("Adam");
    all<reference::SGD>("SGD");
    all<reference::RMSprop>("RMSprop");
    all<Centered>("RMSprop, centered");
    all<reference::Adagrad>("Adagrad");
}

void end() {
    std::cout << (failures == 0 ? "all passed" : std::to_string(failures) + " failed") << std::endl;
    std::cout.flush();
    std::_Exit(failures == 0 ? 0 : 1); // threads of the autograd engine still let go of graphs
}

} // namespace

void play_real() {
    opened("libtorch_cuda.so"); // which nothing here is linked with
    gpu = torch::Device(torch::kCUDA, 0);
    train_all();
    end();
}

void play(const char *device, const char *kernels) {
    load_gpu(device, kernels);
    ask<void, bool>("fakecuda::set_rounds_as_cuda", true);
    train_all();
    refuse();
    try_all_kernels();
    replay(true);
    replay(false);
    for (const std::string &race : ask<std::vector<std::string>>("fakecuda::races"))
        expect(false, "nothing puts in order: " + race);
    end();
}

} // namespace on_gpu
