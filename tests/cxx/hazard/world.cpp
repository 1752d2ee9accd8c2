// SPDX-License-Identifier: BSD-3-Clause
#include "hazard/world.h"

#include <ATen/CPUGeneratorImpl.h>

#include <limits>

namespace hazard {

Tensor numbers(unsigned seed, at::IntArrayRef shape) {
    return torch::randn(shape, at::detail::createCPUGenerator(seed));
}

// ---- parameters

namespace {

constexpr unsigned N_SHAPES = 12;

std::vector<Tensor> tensors_of_shape(unsigned shape, unsigned seed) {
    const auto of = [seed](at::IntArrayRef sizes) { return numbers(seed, sizes); };
    switch (shape % N_SHAPES) {
    case 0:
        return {of({4, 4}).to(torch::kFloat64)};
    case 1:
        return {of({4, 4}).to(torch::kBFloat16)};
    case 2:
        return {of({4, 4}).to(torch::kHalf)};
    case 3:
        return {of({37}).to(torch::kBFloat16)};
    case 4:
        return {of({})};
    case 5:
        return {of({0, 4})};
    case 6:
        return {of({5, 4}).t()};
    case 7:
        return {of({5, 8}).slice(1, 0, 8, 2)}; // has holes
    case 8: {                                  // two of one storage
        const Tensor flat = of({32});
        return {flat.slice(0, 0, 16).view({4, 4}), flat.slice(0, 16).view({4, 4})};
    }
    case 9:
        return {of({1000})};
    default:
        return {of({4, 4})};
    }
}

} // namespace

const std::vector<Tensor> &World::add_param(unsigned shape) {
    for (const Tensor &t : tensors_of_shape(shape, unsigned(seeds())))
        params.push_back(t.detach().requires_grad_());
    return params;
}

std::vector<Tensor> Trained::params() const {
    std::vector<Tensor> found;
    for (const auto &group : optimizer->param_groups())
        found.insert(found.end(), group.params().begin(), group.params().end());
    return found;
}

optim::OptimizerParamState *Trained::entry(const Tensor &param) const {
    const auto found = optimizer->state().find(param.unsafeGetTensorImpl());
    return found == optimizer->state().end() ? nullptr : found->second.get();
}

World::World(const Setup &its, Play as) : setup(its), play(as) {
    for (const unsigned shape : setup.shapes)
        add_param(shape);
    const size_t n = setup.kinds.size();
    for (size_t k = 0; k < n; k++) {
        std::vector<std::vector<Tensor>> chosen(setup.groups);
        for (size_t i = k; i < params.size(); i += n)
            chosen[i / n % setup.groups].push_back(params[i]);
        const Kind *kind = kinds()[setup.kinds[k]].get();
        Groups groups;
        for (size_t g = 0; g < chosen.size(); g++)
            groups.emplace_back(chosen[g], kind->options(setup.variant + unsigned(g)));
        trained.push_back({kind, kind->make(std::move(groups), setup.variant), std::nullopt});
    }
    for (Trained &one : trained)
        fuse(one, false);
}

void World::fuse(Trained &one, bool in_other_mode) {
    if (!is_fused())
        return;
    optfuse::Options options;
    one.in_backward = (play == Play::backward) != in_other_mode;
    options.mode = one.in_backward ? optfuse::Mode::backward : optfuse::Mode::forward;
    options.accumulate = one.in_backward ? setup.passes : 1;
    options.bucket_bytes = setup.bucket_bytes;
    one.fused.reset();
    one.fused.emplace(optfuse::fuse(*one.optimizer, options));
}

// ---- training

bool World::is_unsettled() const {
    for (const Trained &one : trained)
        if (one.fused && one.in_backward && one.unsettled)
            return true;
    return false;
}

// left_out: a bit for each parameter that this pass does not use.
Tensor World::loss(unsigned left_out, unsigned batch) const {
    Tensor x = numbers(1000 + batch, {3, 4}), sum = torch::zeros({});
    for (size_t i = 0; i < params.size(); i++) {
        const Tensor &p = params[i];
        if ((left_out >> i & 1u) != 0)
            continue;
        if (p.sizes() == at::IntArrayRef{4, 4})
            x = torch::tanh(x.to(p.scalar_type()).matmul(p));
        else
            sum = sum + (p * (batch + 1)).square().sum().to(torch::kFloat) / 8;
    }
    return sum + x.to(torch::kFloat).square().mean();
}

void World::backward(const Tensor &loss, bool retains, bool creates) {
    in_backward = true;
    for (Trained &one : trained)
        one.unsettled = true;
    loss.backward({}, retains || creates, creates);
    in_backward = false;
}

Tensor World::step(Trained &one, const optim::Optimizer::LossClosure &closure) {
    Tensor loss;
    if (one.fused) {
        loss = one.fused->step(closure);
    } else {
        if (closure)
            loss = closure();
        for (const auto &group : one.optimizer->param_groups())
            for (const Tensor &param : group.params())
                if (param.grad().defined())
                    one.kind->update(*one.optimizer, group.options(), param);
    }
    one.unsettled = false;
    return loss;
}

void World::zero_grad(Trained &one, bool set_to_none) {
    if (one.fused)
        one.fused->zero_grad(set_to_none);
    else
        one.optimizer->zero_grad(set_to_none);
}

void World::flush(Trained &one) {
    if (one.fused)
        one.fused->flush();
}

// ---- what is compared

void World::see(const std::string &name, const Tensor &value) {
    Tensor copy = value.defined() ? value.detach().clone() : value;
    if (copy.defined() && copy.is_floating_point())
        copy.masked_fill_(copy.isnan(), std::numeric_limits<double>::quiet_NaN());
    seen.emplace_back(label + ": " + name, copy);
}

void World::see_weights_and_state() {
    for (size_t i = 0; i < params.size(); i++)
        see("parameter " + std::to_string(i), params[i]);
    for (const Trained &one : trained) {
        const std::vector<Tensor> its = one.params();
        for (size_t i = 0; i < its.size(); i++) {
            const std::string name = "state of parameter " + std::to_string(i);
            auto *entry = one.entry(its[i]);
            see(name, torch::tensor(int64_t(entry != nullptr)));
            if (entry == nullptr)
                continue;
            for (const Tensor *tensor : one.kind->tensors(*entry))
                see(name, *tensor);
            if (const int64_t *step = one.kind->step(*entry))
                see(name + ", step", torch::tensor(*step));
        }
    }
}

} // namespace hazard
