// SPDX-License-Identifier: BSD-3-Clause
// changing.cpp: what step() will read: options, groups, state, parameters and gradients.
#include "hazard/actions.h"

#include <algorithm>
#include <utility>

namespace hazard {
namespace {

using torch::NoGradGuard;

// ---- options and groups

void change_option(World &w, const Numbers &n) {
    Trained &one = w.at(n[0]);
    auto &groups = one.optimizer->param_groups();
    one.kind->change(groups[n[1] % groups.size()].options(), n[2], n[3]);
}

void schedule(World &w, const Numbers &n) {
    for (auto &group : w.at(n[0]).optimizer->param_groups())
        group.options().set_lr(group.options().get_lr() * 0.5);
}

void add_group(World &w, const Numbers &n) {
    Trained &one = w.at(n[0]);
    const size_t before = w.params.size();
    w.add_param(n[1]);
    const std::vector<Tensor> added(w.params.begin() + int64_t(before), w.params.end());
    one.optimizer->add_param_group({added, one.kind->options(n[2])});
}

void change_group(World &w, const Numbers &n) {
    Trained &one = w.at(n[0]);
    auto &groups = one.optimizer->param_groups();
    auto &group = groups[n[1] % groups.size()];
    auto &params = group.params();
    if (params.empty())
        return;
    const Tensor last = params.back();
    switch (n[2] % 7) {
    case 0:
        std::reverse(params.begin(), params.end());
        break;
    case 1:
        std::reverse(groups.begin(), groups.end());
        break;
    case 2:
        params.pop_back();
        break;
    case 3:
        params.clear();
        break;
    case 4:
        group.set_options(group.options().clone());
        break;
    case 5: // moved
        params.pop_back();
        groups.emplace_back(std::vector<Tensor>{last}, one.kind->options(n[3]));
        break;
    default: // replaced, as densification does
        params.back() = last.detach().clone().requires_grad_(last.requires_grad());
        w.kept.push_back(last);
        std::replace_if(
            w.params.begin(), w.params.end(), [&](const Tensor &p) { return p.is_same(last); },
            params.back());
    }
}

// ---- state

void change_entry(World &w, const Trained &one, optim::OptimizerParamState &entry, unsigned how) {
    const NoGradGuard no_grad;
    if (int64_t *count = one.kind->step(entry); count != nullptr && how % 4 == 0)
        *count += 3;
    for (Tensor *tensor : one.kind->tensors(entry)) {
        if (!tensor->defined())
            continue;
        switch (how % 4) {
        case 1:
            tensor->mul_(0.5);
            break;
        case 2:
            *tensor = tensor->clone();
            break;
        case 3:
            w.held.push_back(std::exchange(*tensor, torch::zeros_like(*tensor)));
            break;
        default:
            break;
        }
    }
}

void change_state(World &w, const Numbers &n) {
    Trained &one = w.at(n[0]);
    const std::vector<Tensor> params = one.params();
    auto &state = one.optimizer->state();
    if (n[2] % 8 == 0)
        state.clear();
    if (params.empty())
        return;
    const Tensor &p = params[n[1] % params.size()];
    auto *entry = one.entry(p);
    if (entry == nullptr)
        return;
    if (n[2] % 8 == 1)
        state.erase(p.unsafeGetTensorImpl());
    else if (n[2] % 8 == 2)
        state[p.unsafeGetTensorImpl()] = entry->clone();
    else
        change_entry(w, one, *entry, n[2]);
}

// ---- writing to parameters and gradients

void write(World &w, const Numbers &n) {
    const NoGradGuard no_grad;
    const Tensor &p = w.param(n[0]);
    switch (n[1] % 4) {
    case 0:
        p.mul_(0.5);
        break;
    case 1:
        p.detach().add_(0.25);
        break;
    case 2:
        p.copy_(torch::ones_like(p));
        break;
    default:
        p.view_as(p).sub_(0.125);
    }
}

// PyTorch's versions tell nothing of these.
void write_data(World &w, const Numbers &n) {
    const Tensor &p = w.param(n[0]);
    switch (n[1] % 3) {
    case 0:
        p.data().mul_(0.5);
        break;
    case 1:
        p.set_data(p.data().clone());
        break;
    default:
        p.set_data(p.data().mul(2).to(n[2] % 4 == 0 ? torch::kFloat64 : p.scalar_type()));
    }
}

void set_gradient(World &w, const Numbers &n) {
    const NoGradGuard no_grad;
    const Tensor &p = w.param(n[0]);
    switch (n[1] % 5) {
    case 0:
        p.mutable_grad() = numbers(n[2], p.sizes()).to(p.scalar_type());
        break;
    case 1:
        p.mutable_grad() = Tensor();
        break;
    case 2:
        p.mutable_grad() = torch::full_like(p, 0.5);
        break;
    case 3:
        if (p.grad().defined())
            p.mutable_grad() = p.grad().clone();
        break;
    default:
        if (p.grad().defined())
            p.mutable_grad().detach_().mul_(0.5);
    }
}

void clip(World &w, const Numbers &n) {
    std::vector<Tensor> params;
    for (const Tensor &p : w.params)
        if (p.scalar_type() == torch::kFloat)
            params.push_back(p);
    if (n[0] % 2 == 0)
        torch::nn::utils::clip_grad_norm_(params, 0.5);
    else
        torch::nn::utils::clip_grad_value_(params, 0.1);
}

void hook_a_gradient(World &w, const Numbers &n) {
    if (w.param(n[0]).requires_grad())
        w.param(n[0]).register_hook([](const Tensor &g) { return g * 0.5; });
}

void freeze(World &w, const Numbers &n) {
    if (const Tensor &p = w.param(n[0]); !p.is_same(w.params[0]))
        p.requires_grad_(!p.requires_grad());
}

} // namespace

std::vector<Action> changing_actions() {
    return {
        {"change_option", 12, true, true, change_option},
        {"schedule", 6, true, true, schedule},
        {"add_group", 4, true, true, add_group},
        {"change_group", 10, true, true, change_group},
        {"change_state", 12, true, true, change_state},
        {"write", 8, true, true, write},
        {"write_data", 3, false, true, write_data},
        {"set_gradient", 8, true, false, set_gradient},
        {"clip", 3, true, false, clip},
        {"hook_a_gradient", 2, true, true, hook_a_gradient},
        {"freeze", 3, true, true, freeze},
    };
}

} // namespace hazard
