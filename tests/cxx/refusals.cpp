// SPDX-License-Identifier: BSD-3-Clause
// refusals.cpp: what optfuse.hpp refuses, in which words, and who may go first at the end.
#include "optfuse.hpp"

#include "common.h"
#include "reference.h"
#include "tests.h"

#include <optional>
#include <sstream>

namespace {

using optfuse::Mode;
using torch::Tensor;
using torch::optim::AdamW;
using torch::optim::OptimizerParamGroup;

struct OwnAdamW final : AdamW {
    using AdamW::AdamW;
};

Tensor weights() {
    return torch::ones({3, 4}).requires_grad_();
}

void backward(const Tensor &w) {
    (w * w).sum().backward();
}

void refuse_optimizers() {
    const Tensor w = weights();
    torch::optim::LBFGS lbfgs({w});
    expect_error("LBFGS", "LBFGS has no fused update in C++", [&] { optfuse::fuse(lbfgs); });
    OwnAdamW own({w});
    expect_error("a class of the user's", "OwnAdamW has no fused", [&] { optfuse::fuse(own); });
    AdamW complex({torch::ones({2}, torch::kComplexFloat)});
    expect_error("a complex parameter", "parameter 0 of group 0 of shape [2] has a dtype without",
                 [&] { optfuse::fuse(complex); });
    AdamW meta({torch::ones({2}, torch::kMeta)});
    expect_error("a parameter elsewhere", "is on meta", [&] { optfuse::fuse(meta); });
    AdamW expanded({torch::ones({1}).expand({4}).requires_grad_()});
    expect_error("an expanded one", "call param.set_data(param.data().clone())",
                 [&] { optfuse::fuse(expanded); });
    AdamW twice({w, w});
    expect_error("a parameter twice", "is in the optimizer twice", [&] { optfuse::fuse(twice); });
    AdamW first({w}), second({w});
    const optfuse::Fused fused = optfuse::fuse(first, Mode::backward);
    expect_error("two in backward mode", "already belongs to another optimizer",
                 [&] { optfuse::fuse(second, Mode::backward); });
}

// Where torch rounds otherwise than our update.
void refuse_other_bits() {
    optfuse::Options strict;
    strict.strict = true;
    torch::optim::Adagrad opt({torch::ones({3}, torch::kHalf)});
    if (TORCH_VERSION_MINOR > 13)
        expect_error("Adagrad in 16 bits", "parameter 0 of group 0 of shape [3] is float16, and",
                     [&] { optfuse::fuse(opt, strict); });
    else
        optfuse::fuse(opt, strict);
    torch::optim::Adagrad wide({torch::ones({3})});
    optfuse::fuse(wide, strict);
    torch::optim::RMSprop half({torch::ones({3}, torch::kHalf)});
    if (reference::takes_sve())
        expect_error("RMSprop in float16 beside SVE", "set ATEN_CPU_CAPABILITY=default before",
                     [&] { optfuse::fuse(half); });
    else
        optfuse::fuse(half);
}

void refuse_other_builds() {
    AdamW opt({weights()});
    of_shim_fused *out = nullptr;
    of_shim_fuse_options options = {};
    options.struct_size = sizeof options;
    options.abi_version = OF_ABI_VERSION;
    options.torch_release = 203;
    const auto call = [&] {
        if (of_shim_fuse(&opt, &options, &out) != OF_OK)
            throw optfuse::Error(of_error_message());
    };
    expect_error("headers of another torch", "with the headers of torch 2.3", call);
    options.abi_version++;
    expect_error("headers of another optfuse", "headers of another optfuse", call);
    options.abi_version--;
    options.struct_size--;
    expect_error("other options", "headers of another optfuse", call);
}

void refuse_gradients() {
    torch::nn::Embedding words(torch::nn::EmbeddingOptions(5, 3).sparse(true));
    AdamW opt(words->parameters());
    optfuse::Fused fused = optfuse::fuse(opt);
    const Tensor before = words->weight.detach().clone();
    words(torch::tensor({1, 2})).sum().backward();
    expect_error("a sparse gradient", "the gradient of parameter 0 of group 0 of shape [5, 3] is",
                 [&] { fused.step(); });
    expect(same_bits(before, words->weight) && opt.state().empty(), "nothing was updated");
}

void refuse_foreign_parts() {
    const Tensor w = weights();
    AdamW opt({w});
    optfuse::Fused fused = optfuse::fuse(opt);
    backward(w);
    auto &group = opt.param_groups()[0];
    group.params().emplace_back();
    expect_error("an undefined tensor", "parameter 1 of group 0 is an undefined",
                 [&] { fused.step(); });
    group.params().pop_back();
    group.set_options(std::make_unique<torch::optim::SGDOptions>(0.1));
    expect_error("options of another class", "set it to torch::optim::AdamWOptions",
                 [&] { fused.step(); });
    group.set_options(std::make_unique<torch::optim::AdamWOptions>(0.1));
    auto &entry = opt.state()[w.unsafeGetTensorImpl()];
    entry = std::make_unique<torch::optim::SGDParamState>();
    expect_error("state of another class", "make it a torch::optim::AdamWParamState",
                 [&] { fused.step(); });
    entry.reset();
    fused.step();
    expect(entry != nullptr, "and the optimizer goes on");
}

// Never an old value: whoever asks for the address meanwhile gets an exception.
void refuse_addresses() {
    const Tensor w = weights();
    AdamW opt({w});
    optfuse::Fused fused = optfuse::fuse(opt);
    for (int step = 0; step < 2; step++) {
        fused.zero_grad();
        backward(w);
        fused.step();
    }
    expect(fused.counts().pending == 1, "an update is pending after step()");
    std::stringstream file;
    bool raised = false;
    try {
        torch::save(opt, file);
    } catch (const c10::Error &) {
        raised = true;
    }
    expect(raised, "saving under a pending update raises");
    fused.flush();
    expect(fused.counts().pending == 0, "nothing is pending after flush()");
    torch::save(opt, file);
    backward(w);
    fused.step();
    optfuse::flush();
    expect(fused.counts().pending == 0, "nor after flush() of all");
}

void refuse_in_backward_mode() {
    const Tensor w = weights(), more = weights();
    AdamW opt({w});
    optfuse::Fused fused = optfuse::fuse(opt, Mode::backward);
    backward(w);
    const Tensor gradient = w.grad();
    expect_error("reading a gradient", "but backward fusion has already applied it",
                 [&] { gradient.sum(); });
    expect_error("zero_grad() before step()", "zero_grad() before step()",
                 [&] { fused.zero_grad(); });
    expect_error("a second backward()", "has already applied it", [&] { backward(w); });
    auto &options = opt.param_groups()[0].options();
    options.set_lr(0.5);
    expect_error("a late change", "was changed between backward() and step()",
                 [&] { fused.step(); });
    options.set_lr(1e-3);
    auto state = std::move(opt.state());
    opt.state().clear();
    expect_error("a late state", "was replaced between backward() and step()",
                 [&] { fused.step(); });
    opt.state() = std::move(state);
    auto &params = opt.param_groups()[0].params();
    params.clear();
    expect_error("a late group", "was taken out of param_groups between", [&] { fused.step(); });
    params.push_back(w);
    w.detach().mul_(0.5);
    expect_error("a late write", "was written in place between", [&] { fused.step(); });
    fused.step();
    fused.zero_grad();
    opt.add_param_group(OptimizerParamGroup({more}));
    expect_error("an unknown group", "call zero_grad() after changing param_groups",
                 [&] { backward(w); });
    fused.zero_grad();
    expect_error("create_graph", "backward() with create_graph",
                 [&] { (w * w).sum().backward({}, true, true); });
    w.mutable_grad() = Tensor();
    fused.zero_grad();
    backward(w);
    w.mutable_grad() = Tensor();
    expect_error("a gradient that is thrown away", "was discarded", [&] { fused.step(); });
    const optfuse::Accumulate only_adds(fused);
    expect_error("a late pass that only adds", "use optfuse::Mode::forward", [&] { backward(w); });
}

// ---- what the wrapper lets the optimizer do

void accumulate() {
    const Tensor w = weights(), v = weights();
    AdamW opt({w}), other({v});
    optfuse::Fused fused = optfuse::fuse(opt, Mode::backward), plain = optfuse::fuse(other);
    {
        const optfuse::Accumulate only_adds(fused);
        backward(w);
    }
    expect(fused.counts().created == 0, "a pass under Accumulate only adds");
    for (const auto &p : {w, v, v})
        backward(p);
    fused.step();
    plain.step();
    expect(same_bits(w, v), "and its gradient counts");
}

void forget_state() {
    const Tensor w = weights(), v = weights();
    AdamW opt({w}), other({v});
    optfuse::Fused fused = optfuse::fuse(opt);
    for (int step = 0; step < 3; step++) {
        fused.zero_grad();
        backward(w);
        fused.step([&] { return Tensor(); });
    }
    optfuse::flush();
    v.detach().copy_(w.detach());
    opt.state().clear();
    const Tensor loss = fused.step([&] {
        fused.zero_grad();
        const Tensor found = (w * w).sum();
        found.backward();
        return found;
    });
    expect(loss.defined(), "step() gives what its closure gave");
    optfuse::Fused begun = optfuse::fuse(other);
    backward(v);
    begun.step();
    const auto entry =
        static_cast<torch::optim::AdamWParamState &>(*opt.state().at(w.unsafeGetTensorImpl()));
    expect(same_bits(w, v) && entry.step() == 1, "state that was cleared begins anew");
}

// Between backward() and step(), as an exception in the loop may leave it, a checkpoint is whole.
void save_before_step() {
    const Tensor w = weights();
    AdamW opt({w});
    optfuse::Fused fused = optfuse::fuse(opt, Mode::backward);
    backward(w);
    const auto &entry =
        static_cast<torch::optim::AdamWParamState &>(*opt.state().at(w.unsafeGetTensorImpl()));
    expect(entry.step() == 1, "the counter belongs to the state after backward()");
    fused.step();
    expect(entry.step() == 1, "and step() does not count again");
}

void end(Mode mode) {
    const Tensor w = weights(), v = weights();
    std::optional<AdamW> opt(std::in_place, std::vector<Tensor>{w});
    AdamW other({v});
    std::optional<optfuse::Fused> fused(optfuse::fuse(*opt, mode));
    optfuse::Fused kept = optfuse::fuse(other);
    backward(w);
    backward(v);
    fused->step();
    kept.step();
    if (mode == Mode::forward)
        opt.reset();
    fused.reset();
    expect(same_bits(w, v), "a wrapper that ends launches what is pending");
    if (opt)
        opt->zero_grad();
    w.mutable_grad() = Tensor();
    backward(w);
    expect(w.grad().sum().item<double>() > 0, "and gradients are the user's again");
}

} // namespace

void test_refusals() {
    refuse_optimizers();
    refuse_other_bits();
    refuse_other_builds();
    refuse_gradients();
    refuse_foreign_parts();
    refuse_addresses();
    refuse_in_backward_mode();
}

void test_lifetime() {
    accumulate();
    forget_state();
    save_before_step();
    end(Mode::forward);
    end(Mode::backward);
}
