// SPDX-License-Identifier: BSD-3-Clause
// reference.h: the updates that Python's torch.optim makes with fused=True, by the operators that
// it calls; of RMSprop, which has none, with foreach=False, and of Adagrad on a GPU by default. In
// the entries of the C++ classes.
#pragma once

#include <ATen/ScalarOps.h>
#include <ATen/Version.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <vector>

namespace reference {

namespace optim = torch::optim;
using torch::Tensor;

// A number where Python's operator takes a tensor. C++ would choose another operator, which rounds
// the number to 16 bits.
inline Tensor number(double value) {
    return at::native::wrapped_scalar_tensor(value);
}

inline Tensor zeros(const Tensor &p) {
    return torch::zeros_like(p.detach());
}

// Adam and AdamW; counter: state["step"] of Python.
template <typename Options, typename Entry>
void adam(const Tensor &p, const Tensor &g, const Options &o, Entry &e, Tensor &counter,
          bool decoupled) {
    for (Tensor *average : {&e.exp_avg(), &e.exp_avg_sq()})
        if (!average->defined())
            *average = zeros(p);
    if (o.amsgrad() && !e.max_exp_avg_sq().defined())
        e.max_exp_avg_sq(zeros(p));
    counter.add_(1);
    const std::vector<Tensor> params{p}, grads{g}, averages{e.exp_avg()}, squares{e.exp_avg_sq()},
        steps{counter},
        maxima = o.amsgrad() ? std::vector<Tensor>{e.max_exp_avg_sq()} : std::vector<Tensor>{};
    const auto [beta1, beta2] = o.betas();
    if (decoupled)
        at::_fused_adamw_(params, grads, averages, squares, maxima, steps, o.lr(), beta1, beta2,
                          o.weight_decay(), o.eps(), o.amsgrad(), false);
    else
        at::_fused_adam_(params, grads, averages, squares, maxima, steps, o.lr(), beta1, beta2,
                         o.weight_decay(), o.eps(), o.amsgrad(), false);
}

// The dtypes in which optfuse has the bits of the operators below.
struct AllDtypes {
    static bool has(torch::Dtype) { return true; }
};

template <typename C, typename O, typename E, bool decoupled> struct AnyAdam : AllDtypes {
    using Class = C;
    using Options = O;
    using Entry = E;
    static Options options() { return Options(1e-2).weight_decay(0.1).betas({0.8, 0.95}); }
    static Options others() { return Options(3e-3).amsgrad(true).eps(1e-6); }
    static std::vector<Tensor *> tensors(Entry &e) {
        return {&e.exp_avg(), &e.exp_avg_sq(), &e.max_exp_avg_sq()};
    }
    static void update(const Tensor &p, const Tensor &g, const Options &o, Entry &e, Tensor &n) {
        adam(p, g, o, e, n, decoupled);
    }
};
using AdamW = AnyAdam<optim::AdamW, optim::AdamWOptions, optim::AdamWParamState, true>;
using Adam = AnyAdam<optim::Adam, optim::AdamOptions, optim::AdamParamState, false>;

struct SGD : AllDtypes {
    using Class = optim::SGD;
    using Options = optim::SGDOptions;
    using Entry = optim::SGDParamState;
    static Options options() { return Options(1e-2).momentum(0.9).dampening(0.2); }
    static Options others() { return Options(5e-3).momentum(0.8).nesterov(true).weight_decay(0.1); }
    static std::vector<Tensor *> tensors(Entry &e) { return {&e.momentum_buffer()}; }
    static void update(const Tensor &p, const Tensor &g, const Options &o, Entry &e, Tensor &) {
        const bool has_buffer = o.momentum() != 0;
        const bool first = has_buffer && !e.momentum_buffer().defined();
        if (first)
            e.momentum_buffer(zeros(p));
        // In 16 bits on the CPU PyTorch's vectors (of 8 elements on AArch64, else 16) are broken, and
        // from torch 2.14 on they round otherwise (docs/numerics.md).
        const bool is_other = p.is_cpu() && p.element_size() == 2;
        const int64_t size = is_other ? 7 : std::max<int64_t>(p.numel(), 1);
        const auto pieces = [size](const Tensor &t) { // in the order of memory
            return t.detach().as_strided({t.numel()}, {1}).split(size);
        };
        at::_fused_sgd_(
            pieces(p), pieces(g), has_buffer ? pieces(e.momentum_buffer()) : std::vector<Tensor>(),
            o.weight_decay(), o.momentum(), o.lr(), o.dampening(), o.nesterov(), false, first);
    }
};

struct Adagrad {
    // Newer operators round otherwise in 16 bits.
    static bool has(torch::Dtype dtype) {
        return TORCH_VERSION_MINOR <= 13 || torch::elementSize(dtype) > 2;
    }
    using Class = optim::Adagrad;
    using Options = optim::AdagradOptions;
    using Entry = optim::AdagradParamState;
    static Options options() { return Options(1e-2).lr_decay(0.01).weight_decay(0.1); }
    static Options others() { return Options(3e-3).eps(1e-6); }
    static std::vector<Tensor *> tensors(Entry &e) { return {&e.sum()}; }
    static void update(const Tensor &p, const Tensor &g, const Options &o, Entry &e, Tensor &n) {
        if (!e.sum().defined())
            e.sum(zeros(p));
        n.add_(1);
        if (!p.is_cpu()) {
            multi_tensor(p, g, o, e, n.item<double>());
            return;
        }
        at::_fused_adagrad_({p}, {g}, {e.sum()}, {n}, o.lr(), o.lr_decay(), o.weight_decay(),
                            o.eps(), false);
    }
    // Python's default on a GPU, one tensor at a time.
    static void multi_tensor(const Tensor &p, Tensor g, const Options &o, Entry &e, double step) {
        if (o.weight_decay() != 0)
            g = g.add(p, o.weight_decay());
        const double rate = -o.lr() / (1 + (step - 1) * o.lr_decay());
        e.sum().addcmul_(g, g);
        p.detach().addcdiv_(g.mul(number(rate)), e.sum().sqrt().add_(number(o.eps())));
    }
};

// Whether PyTorch runs one of its two sets of kernels for SVE.
inline bool takes_sve() {
    return at::get_cpu_capability().rfind("SVE", 0) == 0;
}

struct RMSprop {
    // add() rounds otherwise there.
    static bool has(torch::Dtype dtype) { return dtype != torch::kHalf || !takes_sve(); }
    using Class = optim::RMSprop;
    using Options = optim::RMSpropOptions;
    using Entry = optim::RMSpropParamState;
    static Options options() { return Options(1e-3).momentum(0.9).weight_decay(0.1).eps(1e-3); }
    static Options others() { return Options(3e-3).centered(true).alpha(0.95); }
    static std::vector<Tensor *> tensors(Entry &e) {
        return {&e.square_avg(), &e.momentum_buffer(), &e.grad_avg()};
    }
    static void update(const Tensor &p, Tensor g, const Options &o, Entry &e, Tensor &n) {
        n.add_(1);
        if (!e.square_avg().defined())
            e.square_avg(zeros(p));
        if (o.momentum() > 0 && !e.momentum_buffer().defined())
            e.momentum_buffer(zeros(p));
        if (o.centered() && !e.grad_avg().defined())
            e.grad_avg(zeros(p));
        if (o.weight_decay() != 0)
            g = g.add(p, o.weight_decay());
        e.square_avg().mul_(number(o.alpha())).addcmul_(g, g, 1 - o.alpha());
        Tensor root;
        if (o.centered()) {
            e.grad_avg().lerp_(g, 1 - o.alpha());
            root = e.square_avg().addcmul(e.grad_avg(), e.grad_avg(), -1).sqrt_();
        } else {
            root = e.square_avg().sqrt();
        }
        root.add_(number(o.eps()));
        if (o.momentum() > 0) {
            e.momentum_buffer().mul_(number(o.momentum())).addcdiv_(g, root);
            p.detach().add_(e.momentum_buffer(), -o.lr());
        } else {
            p.detach().addcdiv_(g, root, -o.lr());
        }
    }
};

} // namespace reference
