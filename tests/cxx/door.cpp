// SPDX-License-Identifier: BSD-3-Clause
// door.cpp: optimizers of torch::optim that optfuse.hpp has fused, for Python: deeds and random
// programs of tests/python/programs are played through this door, too (cxx_door.py).
#include "optfuse.hpp"

#include "reference.h"

#include <torch/custom_class.h>

#include <map>

namespace {

namespace optim = torch::optim;
using torch::Tensor;
using Numbers = c10::Dict<std::string, double>; // options, by Python's names
using Params = std::vector<std::vector<Tensor>>;
using Groups = std::vector<optim::OptimizerParamGroup>;
using Entry = optim::OptimizerParamState;

template <typename Options> void set_adam(Options &o, const Numbers &n) {
    o.lr(n.at("lr")).betas({n.at("beta1"), n.at("beta2")}).eps(n.at("eps"));
    o.weight_decay(n.at("weight_decay")).amsgrad(n.at("amsgrad") != 0);
}

void set(optim::AdamWOptions &o, const Numbers &n) {
    set_adam(o, n);
}

void set(optim::AdamOptions &o, const Numbers &n) {
    set_adam(o, n);
}

void set(optim::SGDOptions &o, const Numbers &n) {
    o.lr(n.at("lr")).momentum(n.at("momentum")).dampening(n.at("dampening"));
    o.weight_decay(n.at("weight_decay")).nesterov(n.at("nesterov") != 0);
}

void set(optim::AdagradOptions &o, const Numbers &n) {
    o.lr(n.at("lr")).lr_decay(n.at("lr_decay")).weight_decay(n.at("weight_decay")).eps(n.at("eps"));
    o.initial_accumulator_value(n.at("initial_accumulator_value"));
}

void set(optim::RMSpropOptions &o, const Numbers &n) {
    o.lr(n.at("lr")).alpha(n.at("alpha")).eps(n.at("eps")).weight_decay(n.at("weight_decay"));
    o.momentum(n.at("momentum")).centered(n.at("centered") != 0);
}

struct Kind {
    virtual ~Kind() = default;
    virtual std::unique_ptr<optim::OptimizerOptions> options(const Numbers &numbers) const = 0;
    virtual std::unique_ptr<optim::Optimizer> make(Groups groups, const Numbers &first) const = 0;
    virtual std::unique_ptr<Entry> entry() const = 0;
    virtual std::vector<Tensor *> tensors(Entry &entry) const = 0;
    virtual int64_t *step(Entry &entry) const = 0; // nullptr: it has none
};

template <typename Rule> struct KindOf final : Kind {
    using Options = typename Rule::Options;
    static Options made(const Numbers &numbers) {
        Options made(0.0);
        set(made, numbers);
        return made;
    }
    std::unique_ptr<optim::OptimizerOptions> options(const Numbers &numbers) const override {
        return std::make_unique<Options>(made(numbers));
    }
    std::unique_ptr<optim::Optimizer> make(Groups groups, const Numbers &first) const override {
        return std::make_unique<typename Rule::Class>(std::move(groups), made(first));
    }
    std::unique_ptr<Entry> entry() const override {
        return std::make_unique<typename Rule::Entry>();
    }
    std::vector<Tensor *> tensors(Entry &entry) const override {
        return Rule::tensors(static_cast<typename Rule::Entry &>(entry));
    }
    int64_t *step(Entry &entry) const override {
        if constexpr (std::is_same_v<Rule, reference::SGD>)
            return nullptr;
        else
            return &static_cast<typename Rule::Entry &>(entry).step();
    }
};

const Kind &kind_of(const std::string &name) {
    static const std::map<std::string, std::shared_ptr<Kind>> all = {
        {"AdamW", std::make_shared<KindOf<reference::AdamW>>()},
        {"Adam", std::make_shared<KindOf<reference::Adam>>()},
        {"SGD", std::make_shared<KindOf<reference::SGD>>()},
        {"RMSprop", std::make_shared<KindOf<reference::RMSprop>>()},
        {"Adagrad", std::make_shared<KindOf<reference::Adagrad>>()}};
    return *all.at(name);
}

class Door : public torch::CustomClassHolder {
  public:
    Door(const std::string &name, Params params, std::vector<Numbers> numbers)
        : kind(kind_of(name)),
          optimizer(kind.make(groups_of(std::move(params), numbers), numbers.at(0))) {}

    void fuse(bool in_backward, int64_t accumulate, int64_t bucket_bytes) {
        optfuse::Options options;
        options.mode = in_backward ? optfuse::Mode::backward : optfuse::Mode::forward;
        options.accumulate = size_t(accumulate);
        options.bucket_bytes = size_t(bucket_bytes);
        fused.reset();
        fused = std::make_unique<optfuse::Fused>(optfuse::fuse(*optimizer, options));
    }
    void tell(Params params, std::vector<Numbers> numbers) {
        optimizer->param_groups() = groups_of(std::move(params), numbers);
    }
    void step() { fused->step(); }
    void zero_grad(bool set_to_none) { fused->zero_grad(set_to_none); }
    void flush() { fused->flush(); }
    int64_t created() { return int64_t(fused->counts().created); }
    int64_t pending() { return int64_t(fused->counts().pending); }
    void begin_to_add() { only_adds = std::make_unique<optfuse::Accumulate>(*fused); }
    void end_to_add() { only_adds.reset(); }

    // The counter of a parameter's state; kNone: it has none, kNoState: no state.
    int64_t counter(const Tensor &param) {
        Entry *entry = entry_of(param);
        if (entry == nullptr)
            return kNoState;
        const int64_t *step = kind.step(*entry);
        return step == nullptr ? kNone : *step;
    }
    // Other tensors of the same memory: one that Python has had an object for counts as held.
    std::vector<Tensor> tensors(const Tensor &param) {
        std::vector<Tensor> made;
        for (const Tensor *tensor : kind.tensors(*entry_of(param)))
            made.push_back(tensor->defined() ? alias_of(*tensor) : Tensor());
        return made;
    }
    void set_state(const Tensor &param, std::vector<c10::optional<Tensor>> values, int64_t step) {
        auto &place = optimizer->state()[param.unsafeGetTensorImpl()];
        if (!place)
            place = kind.entry();
        const auto tensors = kind.tensors(*place);
        for (size_t i = 0; i < tensors.size(); i++)
            if (const Tensor value = values[i].value_or(Tensor()); !is_same(*tensors[i], value))
                *tensors[i] = value;
        if (int64_t *its = kind.step(*place))
            *its = step;
    }
    void drop_state(const Tensor &param) {
        optimizer->state().erase(param.unsafeGetTensorImpl());
    }

  private:
    static constexpr int64_t kNone = -1, kNoState = -2;

    Entry *entry_of(const Tensor &param) {
        const auto found = optimizer->state().find(param.unsafeGetTensorImpl());
        return found == optimizer->state().end() ? nullptr : found->second.get();
    }
    static Tensor alias_of(const Tensor &tensor) {
        const auto *impl = tensor.unsafeGetTensorImpl();
        return Tensor(impl->shallow_copy_and_detach(impl->version_counter(), true));
    }
    static bool is_same(const Tensor &a, const Tensor &b) {
        return a.defined() == b.defined() &&
               (!a.defined() || (a.is_alias_of(b) && a.sizes() == b.sizes() &&
                                 a.strides() == b.strides() && a.dtype() == b.dtype() &&
                                 a.storage_offset() == b.storage_offset()));
    }
    Groups groups_of(Params params, const std::vector<Numbers> &numbers) const {
        Groups groups;
        for (size_t i = 0; i < params.size(); i++)
            groups.emplace_back(std::move(params[i]), kind.options(numbers[i]));
        return groups;
    }

    const Kind &kind;
    std::unique_ptr<optim::Optimizer> optimizer;
    std::unique_ptr<optfuse::Fused> fused;
    std::unique_ptr<optfuse::Accumulate> only_adds;
};

TORCH_LIBRARY(optfuse_door, m) {
    m.class_<Door>("Door")
        .def(torch::init<const std::string &, Params, std::vector<Numbers>>())
        .def("fuse", &Door::fuse)
        .def("tell", &Door::tell)
        .def("step", &Door::step)
        .def("zero_grad", &Door::zero_grad)
        .def("flush", &Door::flush)
        .def("created", &Door::created)
        .def("pending", &Door::pending)
        .def("begin_to_add", &Door::begin_to_add)
        .def("end_to_add", &Door::end_to_add)
        .def("counter", &Door::counter)
        .def("tensors", &Door::tensors)
        .def("set_state", &Door::set_state)
        .def("drop_state", &Door::drop_state);
}

} // namespace
