// SPDX-License-Identifier: BSD-3-Clause
#include "cxx/classes.h"

#include <c10/util/Type.h>
#include <torch/optim.h>

#include <string>
#include <typeinfo>

#include "base/error.h"
#include "rules/adagrad.h"
#include "rules/adam.h"
#include "rules/rmsprop.h"
#include "rules/sgd.h"

namespace optfuse {
namespace {

namespace optim = torch::optim;
using Numbers = std::vector<double>;

template <typename Options> const Options &as(const optim::OptimizerOptions &options) {
    const auto *found = dynamic_cast<const Options *>(&options);
    if (found == nullptr)
        fail("optfuse: a parameter group has options of another class than its optimizer's: set "
             "it to " +
             c10::demangle(typeid(Options).name()));
    return *found;
}

template <typename Entry> Entry &as(optim::OptimizerParamState &entry) {
    auto *found = dynamic_cast<Entry *>(&entry);
    if (found == nullptr)
        fail("optfuse: an entry of the optimizer's state is of another class than its "
             "optimizer's: make it a " +
             c10::demangle(typeid(Entry).name()));
    return *found;
}

template <typename Options, bool decoupled> Numbers adam(const optim::OptimizerOptions &options) {
    const auto &o = as<Options>(options);
    Numbers hyper(ADAM_N_OPTIONS);
    hyper[adam_lr] = o.lr();
    hyper[adam_beta1] = std::get<0>(o.betas());
    hyper[adam_beta2] = std::get<1>(o.betas());
    hyper[adam_eps] = o.eps();
    hyper[adam_weight_decay] = o.weight_decay();
    hyper[adam_amsgrad] = o.amsgrad();
    hyper[adam_decoupled_weight_decay] = decoupled;
    return hyper;
}

template <typename Entry> StateEntry adam_entry(optim::OptimizerParamState &entry) {
    auto &e = as<Entry>(entry);
    StateEntry found = {};
    found.tensors[adam_exp_avg] = &e.exp_avg();
    found.tensors[adam_exp_avg_sq] = &e.exp_avg_sq();
    found.tensors[adam_max_exp_avg_sq] = &e.max_exp_avg_sq();
    found.step = &e.step();
    return found;
}

Numbers sgd(const optim::OptimizerOptions &options) {
    const auto &o = as<optim::SGDOptions>(options);
    Numbers hyper(SGD_N_OPTIONS);
    hyper[sgd_lr] = o.lr();
    hyper[sgd_momentum] = o.momentum();
    hyper[sgd_dampening] = o.dampening();
    hyper[sgd_weight_decay] = o.weight_decay();
    hyper[sgd_nesterov] = o.nesterov();
    return hyper;
}

StateEntry sgd_entry(optim::OptimizerParamState &entry) {
    StateEntry found = {};
    found.tensors[sgd_momentum_buffer] = &as<optim::SGDParamState>(entry).momentum_buffer();
    return found;
}

Numbers rmsprop(const optim::OptimizerOptions &options) {
    const auto &o = as<optim::RMSpropOptions>(options);
    Numbers hyper(RMSPROP_N_OPTIONS);
    hyper[rmsprop_lr] = o.lr();
    hyper[rmsprop_alpha] = o.alpha();
    hyper[rmsprop_eps] = o.eps();
    hyper[rmsprop_weight_decay] = o.weight_decay();
    hyper[rmsprop_momentum] = o.momentum();
    hyper[rmsprop_centered] = o.centered();
    return hyper;
}

StateEntry rmsprop_entry(optim::OptimizerParamState &entry) {
    auto &e = as<optim::RMSpropParamState>(entry);
    StateEntry found = {};
    found.tensors[rmsprop_momentum_buffer] = &e.momentum_buffer();
    found.tensors[rmsprop_square_avg] = &e.square_avg();
    found.tensors[rmsprop_grad_avg] = &e.grad_avg();
    found.step = &e.step();
    return found;
}

Numbers adagrad(const optim::OptimizerOptions &options) {
    const auto &o = as<optim::AdagradOptions>(options);
    Numbers hyper(ADAGRAD_N_OPTIONS);
    hyper[adagrad_lr] = o.lr();
    hyper[adagrad_lr_decay] = o.lr_decay();
    hyper[adagrad_weight_decay] = o.weight_decay();
    hyper[adagrad_eps] = o.eps();
    return hyper;
}

StateEntry adagrad_entry(optim::OptimizerParamState &entry) {
    auto &e = as<optim::AdagradParamState>(entry);
    StateEntry found = {};
    found.tensors[adagrad_sum] = &e.sum();
    found.step = &e.step();
    return found;
}

double zero(const optim::OptimizerOptions &) {
    return 0.0;
}

double accumulator(const optim::OptimizerOptions &defaults) {
    return as<optim::AdagradOptions>(defaults).initial_accumulator_value();
}

template <typename Optimizer> bool is(const optim::Optimizer &optimizer) {
    return typeid(optimizer) == typeid(Optimizer);
}

template <typename Entry> std::unique_ptr<optim::OptimizerParamState> make() {
    return std::make_unique<Entry>();
}

const CxxClass classes[] = {
    {"AdamW", "adam", is<optim::AdamW>, adam<optim::AdamWOptions, true>,
     make<optim::AdamWParamState>, adam_entry<optim::AdamWParamState>, zero, 0},
    {"Adam", "adam", is<optim::Adam>, adam<optim::AdamOptions, false>, make<optim::AdamParamState>,
     adam_entry<optim::AdamParamState>, zero, 0},
    {"SGD", "sgd", is<optim::SGD>, sgd, make<optim::SGDParamState>, sgd_entry, zero, 13},
    {"RMSprop", "rmsprop", is<optim::RMSprop>, rmsprop, make<optim::RMSpropParamState>,
     rmsprop_entry, zero, 0},
    {"Adagrad", "adagrad", is<optim::Adagrad>, adagrad, make<optim::AdagradParamState>,
     adagrad_entry, accumulator, 13},
};

} // namespace

const CxxClass &class_of(const torch::optim::Optimizer &optimizer) {
    std::string names;
    for (const CxxClass &row : classes) {
        if (row.is_exactly(optimizer))
            return row;
        names += (names.empty() ? "" : ", ") + std::string(row.name);
    }
    fail("optfuse: " + c10::demangle(typeid(optimizer).name()) +
         " has no fused update in C++. Use one of torch::optim itself (" + names +
         "), or call the step() that it has");
}

} // namespace optfuse
