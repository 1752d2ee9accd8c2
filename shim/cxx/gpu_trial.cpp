// SPDX-License-Identifier: BSD-3-Clause
// gpu_trial.cpp: the same as _selfcheck.py. PyTorch's fused kernels round as its compiler happened
// to contract them for each chip and release, so equal bits are not assumed but looked at.
#include "cxx/gpu_trial.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <tuple>

#include "error.h"
#include "rules/adam.h"
#include "rules/sgd.h"
#include "slots.h"
#include "tensor/refuse.h"

namespace optfuse {
namespace {

constexpr int kSteps = 3;
constexpr int64_t kSizes[] = {1, 7, 64, 1003}; // in fours and not
using Tensors = std::vector<at::Tensor>;

bool is_adam(const char *rule) {
    return std::strcmp(rule, "adam") == 0;
}

// Far above what other roundings of the same formula give, far below an error.
double tolerance(at::ScalarType dtype) {
    switch (dtype) {
    case at::kDouble:
        return 1e-12;
    case at::kFloat:
        return 1e-5;
    case at::kHalf:
        return 1e-2;
    default:
        return 5e-2;
    }
}

// The same ones for both, wherever they go.
class Numbers {
  public:
    explicit Numbers(const at::Tensor &like) : as(like.options()) {}
    Tensors next() {
        Tensors made;
        for (const int64_t size : kSizes)
            made.push_back(at::randn({size}, generator, at::kDouble).to(as));
        return made;
    }

  private:
    const at::TensorOptions as;
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(0);
};

Tensors zeros_like(const Tensors &params) {
    Tensors made;
    for (const at::Tensor &param : params)
        made.push_back(at::zeros_like(param));
    return made;
}

// By PyTorch's fused operators, called as torch.optim calls them.
Tensors train_by_reference(const char *rule, const std::vector<double> &h,
                           const at::Tensor &like) {
    Numbers numbers(like);
    const Tensors params = numbers.next(), a = zeros_like(params), b = zeros_like(params);
    const Tensors most = is_adam(rule) && h[adam_amsgrad] != 0 ? zeros_like(params) : Tensors();
    const Tensors buffers = !is_adam(rule) && h[sgd_momentum] != 0 ? a : Tensors();
    Tensors counters;
    for (const at::Tensor &param : params)
        counters.push_back(at::zeros({}, param.options().dtype(at::kFloat)));
    for (int step = 0; step < kSteps; step++) {
        const Tensors grads = numbers.next();
        if (!is_adam(rule)) {
            at::_fused_sgd_(params, grads, buffers, h[sgd_weight_decay], h[sgd_momentum], h[sgd_lr],
                            h[sgd_dampening], h[sgd_nesterov] != 0, false, step == 0);
            continue;
        }
        for (const at::Tensor &counter : counters)
            counter.add_(1);
        if (h[adam_decoupled_weight_decay] != 0)
            at::_fused_adamw_(params, grads, a, b, most, counters, h[adam_lr], h[adam_beta1],
                              h[adam_beta2], h[adam_weight_decay], h[adam_eps],
                              h[adam_amsgrad] != 0, false);
        else
            at::_fused_adam_(params, grads, a, b, most, counters, h[adam_lr], h[adam_beta1],
                             h[adam_beta2], h[adam_weight_decay], h[adam_eps], h[adam_amsgrad] != 0,
                             false);
    }
    return params;
}

// A plan without an optimizer.
class Trial {
  public:
    Trial(const char *rule, const std::vector<double> &hyper, const Tensors &params,
          const std::string &label) {
        check_status(of_shim_plan_new(rule, OF_FORWARD, "", 0, 1, &handle));
        try {
            check_status(of_shim_group(handle, 0, hyper.data(), hyper.size()));
            for (const at::Tensor &param : params)
                add(param, is_adam(rule), label);
        } catch (...) {
            of_shim_plan_free(handle);
            throw;
        }
    }
    ~Trial() { of_shim_plan_free(handle); }
    Trial(const Trial &) = delete;
    Trial &operator=(const Trial &) = delete;

    void step() {
        std::vector<size_t> needs(plan_of(handle)->slots.size());
        size_t missing = 0;
        check_status(of_shim_step(handle, needs.data(), needs.size(), &missing));
    }
    void flush() {
        bool cleaned = false;
        check_status(of_shim_flush(handle, false, &cleaned));
    }

  private:
    static void check_status(int status) { check(static_cast<of_status>(status)); }

    void add(const at::Tensor &param, bool counts, const std::string &label) {
        Plan &plan = *plan_of(handle);
        const c10::TensorImpl *impl = param.unsafeGetTensorImpl();
        of_dtype dtype = OF_FLOAT32;
        dtype_of(impl, &dtype);
        add_slot(plan, param, 0, false, place_of(impl, dtype), label);
        Slot &slot = *plan.slots.back();
        const unsigned used = plan.rule->state_used(of_plan_hyper(plan.core, slot.index));
        std::vector<std::optional<at::Tensor>> state(plan.rule->n_state);
        for (size_t i = 0; i < state.size(); i++)
            if ((used >> i & 1u) != 0)
                state[i] = at::zeros_like(param);
        const auto counter = counts ? std::optional(at::zeros({}, at::kFloat)) : std::nullopt;
        set_state(slot, state, counter, true);
    }

    of_shim_plan *handle = nullptr;
};

Tensors train(const char *rule, const std::vector<double> &hyper, const at::Tensor &like,
              const std::string &label) {
    Numbers numbers(like);
    const Tensors params = numbers.next();
    Trial trial(rule, hyper, params, label);
    for (int step = 0; step < kSteps; step++) {
        const Tensors grads = numbers.next();
        for (size_t i = 0; i < params.size(); i++)
            params[i].mutable_grad() = grads[i];
        trial.step();
    }
    trial.flush();
    return params;
}

// The largest relative difference; 0 only for equal numbers.
double distance(const at::Tensor &a, const at::Tensor &b) {
    const at::Tensor x = a.cpu().to(at::kDouble), y = b.cpu().to(at::kDouble);
    return x.sub(y).abs().div(y.abs().clamp_min(1e-3)).max().item().toDouble();
}

bool compare(const char *rule, const std::vector<double> &hyper, const at::Tensor &param,
             const std::string &label) {
    const at::AutoGradMode no_grad(false);
    const Tensors ours = train(rule, hyper, param, label);
    const Tensors theirs = train_by_reference(rule, hyper, param);
    double worst = 0.0;
    for (size_t i = 0; i < ours.size(); i++) {
        const double d = distance(ours[i], theirs[i]);
        worst = d <= worst ? worst : d; // NaN is worse
    }
    if (worst <= tolerance(param.scalar_type()))
        return worst != 0.0;
    std::ostringstream text;
    text << "optfuse: " << label << " is on " << param.device() << ", where the update for "
         << param.scalar_type() << " is off by a relative " << worst
         << " from PyTorch's own fused operator, far more than rounding; nothing was fused. Keep "
            "the optimizer as it is, and please report the GPU, the driver and the release of torch";
    fail(text.str());
}

using Kind = std::tuple<std::string, std::vector<double>, at::ScalarType, c10::DeviceIndex>;

} // namespace

bool has_gpu_reference(const char *rule) {
    return is_adam(rule) || std::strcmp(rule, "sgd") == 0;
}

bool gpu_bits_differ(const char *rule, std::vector<double> hyper, const at::Tensor &param,
                     const std::string &label) {
    static std::mutex lock; // guards known
    static auto *known = new std::map<Kind, bool>;
    hyper[is_adam(rule) ? static_cast<size_t>(adam_lr) : static_cast<size_t>(sgd_lr)] = 1e-2;
    const Kind kind{rule, hyper, param.scalar_type(), param.device().index()};
    const std::lock_guard<std::mutex> guard(lock);
    const auto found = known->find(kind);
    if (found != known->end())
        return found->second;
    return (*known)[kind] = compare(rule, hyper, param, label);
}

} // namespace optfuse
