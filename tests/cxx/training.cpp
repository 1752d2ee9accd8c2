// SPDX-License-Identifier: BSD-3-Clause
// training.cpp: fifty steps of a small net in C++, fused and by the operators of the reference:
// every weight and all state must have the same bits.
#include "optfuse.hpp"

#include "common.h"
#include "reference.h"
#include "tests.h"

#include <cmath>
#include <sstream>
#include <thread>

namespace {

using torch::Tensor;

// Several kinds of layers and all dtypes; a parameter that never gets a gradient, and one that
// gets its first one late.
struct NetImpl : torch::nn::Module {
    explicit NetImpl(bool (&has)(torch::Dtype)) {
        register_module("words", words);
        register_module("conv", conv);
        register_module("wide", wide);
        wide->to(torch::kFloat64);
        register_module("narrow", narrow);
        const auto or_wider = [&](torch::Dtype it) { return has(it) ? it : torch::kFloat32; };
        narrow->to(or_wider(torch::kBFloat16));
        half = register_parameter("half", torch::randn({40}).to(or_wider(torch::kHalf)));
        late = register_parameter("late", torch::randn({17, 3}));
        idle = register_parameter("idle", torch::randn({5}));
    }

    Tensor forward(const Tensor &tokens, bool has_late) {
        Tensor x = words(tokens).unsqueeze(1);
        x = torch::relu(conv(x)).flatten(1);
        x = torch::tanh(wide(x.to(torch::kFloat64)));
        x = narrow(x.to(narrow->weight.scalar_type())).to(half.scalar_type()) * half;
        const Tensor loss = x.to(torch::kFloat32).square().mean() * 10;
        return has_late ? loss + late.square().sum() : loss;
    }

    torch::nn::Embedding words{50, 12};
    torch::nn::Conv2d conv{torch::nn::Conv2dOptions(1, 4, 3).padding(1)};
    torch::nn::Linear wide{4 * 9 * 12, 40};
    torch::nn::Linear narrow{40, 40};
    Tensor half, late, idle;
};
TORCH_MODULE(Net);

// A net with its optimizer, of two parameter groups.
template <typename Rule> struct Fused {
    explicit Fused(optfuse::Mode as) : mode(as), opt(groups(), Rule::options()) {}

    std::vector<torch::optim::OptimizerParamGroup> groups() {
        std::vector<Tensor> first = net->parameters(), second;
        while (second.size() < 4) {
            second.push_back(first.back());
            first.pop_back();
        }
        return {{first, std::make_unique<typename Rule::Options>(Rule::options())},
                {second, std::make_unique<typename Rule::Options>(Rule::others())}};
    }

    optfuse::Mode mode;
    Net net{Rule::has};
    typename Rule::Class opt;
    optfuse::Fused fused = optfuse::fuse(opt, mode);
};

// The same net, updated by the reference with the options that the optimizer has.
template <typename Rule> struct Stock {
    explicit Stock(const Net &other) {
        const torch::NoGradGuard no_grad;
        for (size_t i = 0; i < net->parameters().size(); i++)
            net->parameters()[i].copy_(other->parameters()[i]);
        entries.resize(net->parameters().size());
        for (size_t i = 0; i < entries.size(); i++)
            counters.push_back(torch::zeros({}));
    }

    void step(const typename Rule::Class &opt) {
        const torch::NoGradGuard no_grad;
        const std::vector<Tensor> params = net->parameters();
        size_t i = 0;
        for (const auto &group : opt.param_groups())
            for (size_t k = 0; k < group.params().size(); k++) {
                // The second group has the last parameters in reverse order.
                const size_t at = &group == &opt.param_groups()[0] ? i : params.size() - 1 - k;
                i++;
                const auto &options = static_cast<const typename Rule::Options &>(group.options());
                if (params[at].grad().defined())
                    Rule::update(params[at], params[at].grad(), options, entries[at], counters[at]);
            }
    }

    Net net{Rule::has};
    std::vector<typename Rule::Entry> entries;
    std::vector<Tensor> counters;
};

template <typename Rule>
void compare(const std::string &what, const Fused<Rule> &ours, const Stock<Rule> &stock) {
    const std::vector<Tensor> a = ours.net->parameters(), b = stock.net->parameters();
    for (size_t i = 0; i < a.size(); i++) {
        const std::string of = what + ", parameter " + std::to_string(i);
        expect(same_bits(a[i], b[i]), of + " has the bits of the reference");
        const auto found = ours.opt.state().find(a[i].unsafeGetTensorImpl());
        if (!b[i].grad().defined())
            continue; // Adagrad has an entry from the beginning
        expect(found != ours.opt.state().end(), of + " has state");
        if (found == ours.opt.state().end())
            continue;
        const auto &entry = static_cast<const typename Rule::Entry &>(*found->second);
        const std::vector<Tensor> x = Rule::state(entry), y = Rule::state(stock.entries[i]);
        for (size_t k = 0; k < x.size(); k++)
            expect(same_bits(x[k], y[k]), of + ", state " + std::to_string(k) + " has its bits");
        if constexpr (!std::is_same_v<Rule, reference::SGD>)
            expect(entry.step() == stock.counters[i].template item<int64_t>(), of + " is counted");
    }
}

Tensor tokens(int64_t step) {
    return torch::arange(8 * 9).add(step * 7).remainder(50).view({8, 9});
}

template <typename Rule>
void save(Fused<Rule> &from, std::stringstream &net, std::stringstream &opt) {
    from.fused.flush();
    torch::save(from.net, net);
    torch::save(from.opt, opt);
}

template <typename Rule> std::unique_ptr<Fused<Rule>> saved_and_loaded(Fused<Rule> &from) {
    std::stringstream net, opt;
    save(from, net, opt);
    auto to = std::make_unique<Fused<Rule>>(from.mode);
    torch::load(to->net, net);
    torch::load(to->opt, opt);
    return to;
}

template <typename Rule> void train(const std::string &name, optfuse::Mode mode) {
    const bool backward = mode == optfuse::Mode::backward;
    const std::string what = name + (backward ? " in backward mode" : " in forward mode");
    torch::manual_seed(1);
    auto ours = std::make_unique<Fused<Rule>>(mode);
    Stock<Rule> stock(ours->net);
    uint64_t inside = 0, at_use = 0;
    int equal = 0; // losses
    for (int64_t step = 0; step < 50; step++) {
        if (step == 20) // as a scheduler does
            for (auto &group : ours->opt.param_groups())
                group.options().set_lr(group.options().get_lr() / 2);
        if (step == 30) {
            at_use += ours->fused.counts().at_use;
            ours = saved_and_loaded(*ours);
        }
        ours->fused.zero_grad();
        stock.net->zero_grad();
        const Tensor loss = ours->net->forward(tokens(step), step >= 5);
        const Tensor expected = stock.net->forward(tokens(step), step >= 5);
        equal += same_bits(loss, expected) && std::isfinite(loss.item<float>());
        const uint64_t before = ours->fused.counts().created;
        loss.backward();
        expected.backward();
        inside += ours->fused.counts().created - before;
        if (!backward && step % 10 == 3) {
            torch::nn::utils::clip_grad_norm_(ours->net->parameters(), 0.5);
            torch::nn::utils::clip_grad_norm_(stock.net->parameters(), 0.5);
        }
        ours->fused.step();
        stock.step(ours->opt);
    }
    at_use += ours->fused.counts().at_use;
    expect(equal == 50, what + ": every loss has its bits, not only " + std::to_string(equal));
    expect(backward == (inside >= 50), what + ": updates run inside backward()");
    expect(backward || at_use >= 50, what + ": updates run at the first use");
    compare(what, *ours, stock);
}

template <typename Rule> void both(const std::string &name) {
    train<Rule>(name, optfuse::Mode::forward);
    train<Rule>(name, optfuse::Mode::backward);
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
