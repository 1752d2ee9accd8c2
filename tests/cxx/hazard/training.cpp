// SPDX-License-Identifier: BSD-3-Clause
// training.cpp: backward passes and steps, in any order.
#include "hazard/actions.h"

#include <memory>

namespace hazard {
namespace {

// The parameters that a pass leaves out: mostly none, and never the first.
unsigned some(unsigned n) {
    return n % 3 == 0 ? n & ~1u : 0;
}

void zero_all(World &w, bool set_to_none) {
    for (Trained &one : w.trained)
        w.zero_grad(one, set_to_none);
}

void step_all(World &w) {
    for (Trained &one : w.trained)
        w.step(one);
}

void iteration(World &w, const Numbers &n) {
    zero_all(w, n[0] % 4 != 0);
    for (size_t pass = 0; pass < w.setup.passes; pass++) {
        const Tensor loss = w.loss(some(n[1]), n[2] + unsigned(pass));
        w.backward(loss);
        w.see("loss", loss);
    }
    step_all(w);
}

void late_change(World &w, const Numbers &n) {
    zero_all(w, n[0] % 2 == 0);
    w.backward(w.loss(some(n[1]), n[2]));
    std::vector<Action> changes;
    for (const Action &action : changing_actions())
        if (action.between)
            changes.push_back(action);
    changes[n[3] % changes.size()].run(w, {n[1], n[2], n[3] / 8, n[0]});
    step_all(w);
}

void zero_grad(World &w, const Numbers &n) {
    w.zero_grad(w.at(n[0]), n[1] % 2 == 0);
}

void zero_by_hand(World &w, const Numbers &n) {
    const torch::NoGradGuard no_grad;
    for (const Tensor &p : w.params) {
        if (p.grad().defined() && n[0] % 3 == 0)
            p.mutable_grad().detach_().zero_();
        else if (p.grad().defined() && n[0] % 3 == 1)
            p.mutable_grad() = torch::zeros_like(p);
        else
            p.mutable_grad() = Tensor();
    }
}

void backward(World &w, const Numbers &n) {
    w.backward(w.loss(some(n[0]), n[1]), n[2] % 2 == 0, n[3] % 8 == 0);
}

void keep_a_loss(World &w, const Numbers &n) {
    w.losses.push_back(w.loss(some(n[0]), n[1]));
}

void backward_of_a_kept_loss(World &w, const Numbers &n) {
    if (!w.losses.empty())
        w.backward(w.losses[n[0] % w.losses.size()], n[1] % 2 == 0);
}

void gradients_of_a_loss(World &w, const Numbers &n) {
    for (const Tensor &gradient :
         torch::autograd::grad({w.loss(0, n[0])}, {w.param(n[1])}, {}, std::nullopt, false, true))
        w.see("gradient", gradient);
}

void passes_that_add(World &w, const Numbers &n) {
    zero_all(w, n[2] % 2 == 0);
    {
        std::vector<std::unique_ptr<optfuse::Accumulate>> only_add;
        for (Trained &one : w.trained)
            if (one.fused)
                only_add.push_back(std::make_unique<optfuse::Accumulate>(*one.fused));
        w.loss(some(n[0]), n[1]).backward();
    }
    if (n[3] % 4 != 0)
        w.backward(w.loss(some(n[1]), n[0]));
    step_all(w);
}

void step(World &w, const Numbers &n) {
    w.step(w.at(n[0]));
}

void step_with_closure(World &w, const Numbers &n) {
    Trained &one = w.at(n[0]);
    const auto closure = [&] {
        w.zero_grad(one, n[1] % 2 == 0);
        const Tensor loss = w.loss(some(n[2]), n[3]);
        w.backward(loss);
        return loss;
    };
    w.see("loss", w.step(one, closure));
}

void step_of_torch(World &w, const Numbers &n) {
    w.at(n[0]).optimizer->step();
    w.at(n[0]).unsettled = false;
}

} // namespace

std::vector<Action> training_actions() {
    return {
        {"iteration", 40, false, true, iteration},
        {"late_change", 20, false, false, late_change},
        {"zero_grad", 6, true, false, zero_grad},
        {"zero_by_hand", 4, true, false, zero_by_hand},
        {"backward", 8, false, false, backward},
        {"keep_a_loss", 3, false, true, keep_a_loss},
        {"backward_of_a_kept_loss", 4, true, false, backward_of_a_kept_loss},
        {"gradients_of_a_loss", 2, false, true, gradients_of_a_loss},
        {"passes_that_add", 5, false, true, passes_that_add},
        {"step", 8, true, false, step},
        {"step_with_closure", 8, false, true, step_with_closure},
        {"step_of_torch", 2, true, false, step_of_torch},
    };
}

} // namespace hazard
