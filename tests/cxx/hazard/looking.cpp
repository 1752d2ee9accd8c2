// SPDX-License-Identifier: BSD-3-Clause
// looking.cpp: whatever looks at weights, gradients and state, or carries them elsewhere.
#include "hazard/actions.h"

#include <sstream>
#include <utility>

namespace hazard {
namespace {

// ---- reading and keeping

void look(World &w, const Numbers &) {
    w.see_weights_and_state();
}

void look_at_gradients(World &w, const Numbers &) {
    for (const Tensor &p : w.params)
        w.see("gradient", p.grad());
}

void read(World &w, const Numbers &n) {
    const Tensor &p = w.param(n[0]);
    w.see("sum", n[1] % 2 == 0 ? p.sum() : p.detach().abs().sum());
}

void hold(World &w, const Numbers &n) {
    const Tensor &p = w.param(n[0]);
    switch (n[1] % 3) {
    case 0:
        w.held.push_back(p.detach());
        break;
    case 1:
        w.held.push_back(p.grad());
        break;
    default:
        for (const Trained &one : w.trained)
            if (auto *entry = one.entry(p))
                w.held.push_back(*one.kind->tensors(*entry)[0]);
    }
}

void see_held(World &w, const Numbers &) {
    for (const Tensor &tensor : w.held)
        w.see("held", tensor);
}

void read_by_address(World &w, const Numbers &n) {
    const Tensor &p = w.param(n[0]);
    if (n[1] % 2 == 0)
        optfuse::flush();
    if (p.is_contiguous())
        w.see("memory", torch::from_blob(p.data_ptr(), p.sizes(), p.options()));
}

void flush(World &w, const Numbers &n) {
    w.flush(w.at(n[0]));
}

// ---- saving, loading, fusing again

void save_and_load(World &w, const Numbers &n) {
    Trained &one = w.at(n[0]);
    if (n[1] % 4 != 0)
        w.flush(one);
    std::stringstream file;
    torch::save(*one.optimizer, file);
    if (n[2] % 2 == 0) { // into another
        Groups groups(one.optimizer->param_groups());
        const bool was_fused = one.fused.has_value();
        one.fused.reset();
        one.optimizer = one.kind->make(std::move(groups), w.setup.variant);
        if (was_fused)
            w.fuse(one, false);
    }
    torch::load(*one.optimizer, file);
}

void unfuse(World &w, const Numbers &n) {
    w.at(n[0]).fused.reset();
}

void fuse_again(World &w, const Numbers &n) {
    w.fuse(w.at(n[0]), n[1] % 4 == 0);
}

} // namespace

std::vector<Action> looking_actions() {
    return {
        {"look", 6, false, true, look},
        {"look_at_gradients", 3, true, false, look_at_gradients},
        {"read", 6, false, true, read},
        {"hold", 6, true, true, hold},
        {"see_held", 3, false, true, see_held},
        {"read_by_address", 3, false, true, read_by_address},
        {"flush", 3, true, true, flush},
        {"save_and_load", 6, false, true, save_and_load},
        {"unfuse", 3, false, true, unfuse},
        {"fuse_again", 4, false, true, fuse_again},
    };
}

} // namespace hazard
