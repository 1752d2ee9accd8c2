// SPDX-License-Identifier: BSD-3-Clause
#include "hazard/kinds.h"

#include "reference.h"

#include <type_traits>
#include <utility>

namespace hazard {
namespace {

constexpr double RATES[] = {1e-1, 1e-2, 1e-3, 0}, DECAYS[] = {0, 0.1, 0.01, 0.5},
                 BETAS[] = {0.9, 0.5, 0.99, 0}, EPSILONS[] = {1e-8, 1e-3, 1e-6, 1e-10};

// ---- options, by number

template <typename Options> using Change = void (*)(Options &o, unsigned value);

template <typename Options> void lr(Options &o, unsigned value) {
    o.lr(RATES[value]);
}

template <typename Options> void weight_decay(Options &o, unsigned value) {
    o.weight_decay(DECAYS[value]);
}

template <typename Options> void eps(Options &o, unsigned value) {
    o.eps(EPSILONS[value]);
}

// Those of Adam and AdamW.
template <typename Options>
const std::vector<Change<Options>> CHANGES = {
    lr, weight_decay, [](Options &o, unsigned value) { o.betas({BETAS[value], 0.95}); }, eps,
    [](Options &o, unsigned) { o.amsgrad(!o.amsgrad()); }};

template <>
const std::vector<Change<optim::SGDOptions>> CHANGES<optim::SGDOptions> = {
    lr, weight_decay,
    [](optim::SGDOptions &o, unsigned value) { o.momentum(BETAS[value]).nesterov(false); },
    [](optim::SGDOptions &o, unsigned value) { o.dampening(DECAYS[value]).nesterov(false); },
    [](optim::SGDOptions &o, unsigned) {
        o.nesterov(!o.nesterov() && o.momentum() > 0 && o.dampening() == 0);
    }};

template <>
const std::vector<Change<optim::AdagradOptions>> CHANGES<optim::AdagradOptions> = {
    lr, weight_decay, [](optim::AdagradOptions &o, unsigned value) { o.lr_decay(DECAYS[value]); },
    eps};

template <>
const std::vector<Change<optim::RMSpropOptions>> CHANGES<optim::RMSpropOptions> = {
    lr,
    weight_decay,
    [](optim::RMSpropOptions &o, unsigned value) { o.alpha(BETAS[value]); },
    eps,
    [](optim::RMSpropOptions &o, unsigned value) { o.momentum(BETAS[value]); },
    [](optim::RMSpropOptions &o, unsigned) { o.centered(!o.centered()); }};

// ---- the reference, on dense tensors of one layout: PyTorch's fused kernels read memory in order

template <typename Rule> struct KindOf final : Kind {
    using Options = typename Rule::Options;
    using Entry = typename Rule::Entry;
    static constexpr bool is_sgd = std::is_same_v<Rule, reference::SGD>;

    static Options variants(unsigned variant) {
        switch (variant % 3) {
        case 0:
            return Rule::options();
        case 1:
            return Rule::others();
        default:
            return Options(1e-2);
        }
    }
    std::unique_ptr<optim::OptimizerOptions> options(unsigned variant) const override {
        return std::make_unique<Options>(variants(variant));
    }
    std::unique_ptr<optim::Optimizer> make(Groups groups, unsigned variant) const override {
        return std::make_unique<typename Rule::Class>(std::move(groups), variants(variant));
    }
    void change(optim::OptimizerOptions &options, unsigned which, unsigned value) const override {
        const auto &changes = CHANGES<Options>;
        changes[which % changes.size()](static_cast<Options &>(options), value % 4);
    }
    std::vector<Tensor *> tensors(optim::OptimizerParamState &entry) const override {
        return Rule::tensors(static_cast<Entry &>(entry));
    }
    int64_t *step(optim::OptimizerParamState &entry) const override {
        if constexpr (is_sgd)
            return nullptr;
        else
            return &static_cast<Entry &>(entry).step();
    }

    void update(optim::Optimizer &optimizer, const optim::OptimizerOptions &options,
                const Tensor &param) const override {
        const torch::NoGradGuard no_grad;
        const auto &o = static_cast<const Options &>(options);
        Entry none;
        update_dense(param, o, keeps_state(o) ? entry_of(optimizer, param) : none);
    }

  private:
    static bool keeps_state([[maybe_unused]] const Options &o) {
        if constexpr (is_sgd)
            return o.momentum() != 0;
        else
            return true;
    }

    static Entry &entry_of(optim::Optimizer &optimizer, const Tensor &param) {
        auto &place = optimizer.state()[param.unsafeGetTensorImpl()];
        if (!place)
            place = std::make_unique<Entry>();
        auto &entry = static_cast<Entry &>(*place);
        if constexpr (std::is_same_v<Rule, reference::Adagrad>)
            if (!entry.sum().defined())
                entry.sum(torch::full_like(param, static_cast<const Options &>(optimizer.defaults())
                                                      .initial_accumulator_value()));
        return entry;
    }

    static Tensor laid_out_as(const Tensor &other, const Tensor &t) {
        return t.strides() == other.strides() ? t.detach() : torch::zeros_like(other).copy_(t);
    }

    static void update_dense(const Tensor &param, const Options &o, Entry &entry) {
        const Tensor dense =
            param.is_non_overlapping_and_dense() ? param.detach() : param.detach().contiguous();
        const std::vector<Tensor *> places = Rule::tensors(entry);
        std::vector<Tensor> kept;
        for (Tensor *place : places) {
            kept.push_back(*place);
            if (place->defined())
                *place = laid_out_as(dense, *place);
        }
        Tensor counter = torch::zeros({});
        if constexpr (!is_sgd)
            counter.fill_(entry.step());
        Rule::update(dense, laid_out_as(dense, param.grad()), o, entry, counter);
        if constexpr (!is_sgd)
            entry.step(counter.item<int64_t>());
        param.detach().copy_(dense);
        for (size_t i = 0; i < places.size(); i++)
            if (kept[i].defined())
                *places[i] = kept[i].copy_(*places[i]);
    }
};

} // namespace

const std::vector<std::unique_ptr<Kind>> &kinds() {
    static const auto all = [] {
        std::vector<std::unique_ptr<Kind>> made;
        made.push_back(std::make_unique<KindOf<reference::AdamW>>());
        made.push_back(std::make_unique<KindOf<reference::Adam>>());
        made.push_back(std::make_unique<KindOf<reference::SGD>>());
        made.push_back(std::make_unique<KindOf<reference::RMSprop>>());
        made.push_back(std::make_unique<KindOf<reference::Adagrad>>());
        return made;
    }();
    return all;
}

} // namespace hazard
