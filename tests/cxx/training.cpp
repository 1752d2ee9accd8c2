// SPDX-License-Identifier: BSD-3-Clause
// training.cpp: when updates run, how far they are from torch::optim's step(), and several threads.
// That all bits are the reference's is shown by deeds and random programs (door.cpp).
#include "optfuse.hpp"

#include "common.h"
#include "reference.h"
#include "tests.h"

#include <thread>

namespace {

using torch::Tensor;

// A weight's twelve steps, in which no gradient is read.
template <typename Rule> void train(const std::string &name, optfuse::Mode mode) {
    const bool backward = mode == optfuse::Mode::backward;
    const std::string what = name + (backward ? " in backward mode" : " in forward mode");
    const Tensor w = torch::ones({3, 4}).requires_grad_();
    typename Rule::Class opt({w}, Rule::options());
    optfuse::Fused fused = optfuse::fuse(opt, mode);
    uint64_t inside = 0;
    for (int step = 0; step < 12; step++) {
        fused.zero_grad();
        const Tensor loss = (w * w).sum();
        const uint64_t before = fused.counts().created;
        loss.backward();
        inside += fused.counts().created - before;
        fused.step();
    }
    expect(inside == (backward ? 12 : 0), what + ": updates run inside backward()");
    expect(backward || fused.counts().at_use >= 11, what + ": updates run at the first use");
}

// Steps in 16 bits, where Python's fused=True is broken for SGD, beside the reference's.
template <typename Rule> void narrow(const std::string &name, torch::Dtype dtype) {
    if (!Rule::has(dtype))
        return;
    torch::manual_seed(1);
    const Tensor p = torch::randn({37}).to(dtype).requires_grad_(), q = p.detach().clone();
    const auto options = Rule::others();
    typename Rule::Class opt({p}, options);
    optfuse::Fused fused = optfuse::fuse(opt);
    typename Rule::Entry entry;
    Tensor counter = torch::zeros({});
    for (int step = 0; step < 5; step++) {
        p.mutable_grad() = torch::randn({37}).to(dtype);
        const Tensor gradient = p.grad().clone();
        fused.step();
        Rule::update(q, gradient, options, entry, counter);
        expect(same_bits(p, q), name + " has the reference's bits in " + c10::toString(dtype));
    }
}

template <typename Rule> void both(const std::string &name) {
    train<Rule>(name, optfuse::Mode::forward);
    train<Rule>(name, optfuse::Mode::backward);
    for (const torch::Dtype dtype : {torch::kBFloat16, torch::kHalf, torch::kFloat})
        narrow<Rule>(name, dtype);
}

// ---- the distance to the step() of torch::optim itself

// 200 steps on the same gradients: the largest difference of a weight, by the largest weight.
template <typename Rule> double distance(const typename Rule::Options &options) {
    torch::manual_seed(2);
    const Tensor p = torch::randn({1000}).requires_grad_();
    const Tensor q = p.detach().clone().requires_grad_();
    typename Rule::Class opt({p}, options), stock({q}, options);
    auto fused = optfuse::fuse(opt);
    for (int step = 0; step < 200; step++) {
        p.mutable_grad() = torch::randn({1000});
        q.mutable_grad() = p.grad().clone();
        fused.step();
        stock.step();
    }
    return ((p - q).abs().max() / q.abs().max()).template item<double>();
}

template <typename Rule> void measure(const std::string &name) {
    const double d = std::max(distance<Rule>(Rule::options()), distance<Rule>(Rule::others()));
    std::cout << name << ": distance to torch::optim's step() " << d << std::endl;
    expect(d <= DISTANCE, name + ": the distance is within the bound of docs/cxx.md");
}

// ---- several threads

// Nine steps by so many threads together, which begin without state.
std::vector<Tensor> stepped(int threads) {
    torch::manual_seed(3);
    std::vector<Tensor> params;
    for (int i = 0; i < 2000; i++) {
        params.push_back(torch::randn({4}).requires_grad_());
        params.back().mutable_grad() = torch::randn({4});
    }
    torch::optim::SGD opt(params, torch::optim::SGDOptions(0.1).momentum(0.9).dampening(0.5));
    auto fused = optfuse::fuse(opt);
    std::vector<std::thread> running;
    for (int t = 0; t < threads; t++)
        running.emplace_back([&] {
            for (int step = 0; step < 9 / threads; step++)
                fused.step();
        });
    for (std::thread &thread : running)
        thread.join();
    fused.flush();
    return params;
}

} // namespace

void test_threads() {
    const std::vector<Tensor> alone = stepped(1);
    for (int round = 0; round < 5; round++) {
        const std::vector<Tensor> together = stepped(3);
        bool same = true;
        for (size_t i = 0; i < alone.size(); i++)
            same = same && same_bits(alone[i], together[i]);
        expect(same, "steps of several threads come one after the other");
    }
}

void test_training() {
    both<reference::AdamW>("AdamW");
    both<reference::Adam>("Adam");
    both<reference::SGD>("SGD");
    both<reference::RMSprop>("RMSprop");
    both<reference::Adagrad>("Adagrad");
}

void test_distance() {
    measure<reference::AdamW>("AdamW");
    measure<reference::Adam>("Adam");
    measure<reference::SGD>("SGD");
    measure<reference::RMSprop>("RMSprop");
    measure<reference::Adagrad>("Adagrad");
}
