// SPDX-License-Identifier: BSD-3-Clause
// trial.cpp: PyTorch's kernels round as its compiler happened to contract them for each chip and
// release (docs/numerics.md), so equal bits are not assumed but looked at, on this very GPU: in a
// few small steps, the last of them with clipped gradients.
#include "doors/gpu_trial.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <tuple>

#include "base/device.h"
#include "base/error.h"
#include "base/plain_mode.h"
#include "clipping/pending.h"
#include "doors/gpu_reference.h"
#include "plan/refuse.h"
#include "plan/slots.h"

namespace optfuse {
namespace {

constexpr int kSteps = 3;
// In fours and not; all threads of a block, several times.
constexpr int64_t kSizes[] = {1, 7, 64, 1003, 8196, 9001};
constexpr double kClipped = 0.0123; // the factor of the last step

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

// An update, and what is said if it is wrong.
struct Tried {
    const of_rule &rule;
    const std::vector<double> &hyper;
    const at::TensorOptions there;
    const std::string &label;
    const bool mixed; // the state is bfloat16, the parameters float32
};

// The same ones for both, wherever they go: tensors of all sizes, twice.
class TrialNumbers {
  public:
    explicit TrialNumbers(const at::TensorOptions &there) : as(there) {}
    Tensors next() {
        Tensors made;
        for (int half = 0; half < 2; half++)
            for (const int64_t size : kSizes)
                made.push_back(at::randn({size}, generator, at::kDouble).to(as));
        return made;
    }

  private:
    const at::TensorOptions as;
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(0);
};

// Zeros, in the rule's order; none of what these options don't use.
std::vector<Tensors> state_of(const Tried &tried, const Tensors &params) {
    const unsigned used = tried.rule.state_used(tried.hyper.data());
    const at::ScalarType dtype =
        tried.mixed ? at::kBFloat16 : c10::typeMetaToScalarType(tried.there.dtype());
    std::vector<Tensors> state(tried.rule.n_state);
    for (size_t i = 0; i < state.size(); i++)
        for (const at::Tensor &param : params)
            if ((used >> i & 1u) != 0)
                state[i].push_back(at::zeros_like(param, param.options().dtype(dtype)));
    return state;
}

Tensors train_by_reference(const Tried &tried) {
    TrialNumbers numbers(tried.there);
    const Tensors params = numbers.next();
    const std::vector<Tensors> state = state_of(tried, params);
    for (int step = 1; step <= kSteps; step++) {
        const Tensors grads = numbers.next();
        if (step == kSteps) // as torch.nn.utils.clip_grad_norm_() does
            at::_foreach_mul_(grads, at::full({}, kClipped, tried.there));
        gpu_reference(tried.rule.name).update(tried.hyper, step, params, grads, state);
    }
    return params;
}

// A plan without an optimizer.
class Trial : Pinned {
  public:
    Trial(const Tried &tried, const Tensors &params) {
        check(of_shim_plan_new(tried.rule.name, OF_FORWARD, "", 0, 1, &handle));
        try {
            check(of_shim_group(handle, 0, tried.hyper.data(), tried.hyper.size()));
            if (tried.mixed)
                of_shim_take_mixed(handle);
            const std::vector<Tensors> state = state_of(tried, params);
            for (size_t i = 0; i < params.size(); i++)
                add(params[i], state, i, i >= params.size() / 2, tried.label);
        } catch (...) {
            of_shim_plan_free(handle);
            throw;
        }
    }
    ~Trial() { of_shim_plan_free(handle); }

    // Leaves multiplying the gradients to the next step().
    void clip(const at::Tensor &factor) {
        Plan *plan = plan_of(handle);
        std::vector<GradientOf> gradients;
        for (Slot *slot : plan->slots)
            gradients.push_back(of_slot(slot));
        scale_all(gradients, factor);
    }
    void step() {
        std::vector<size_t> needs(plan_of(handle)->slots.size());
        size_t missing = 0;
        check(of_shim_step(handle, needs.data(), needs.size(), &missing));
    }
    void flush() {
        bool cleaned = false;
        check(of_shim_flush(handle, false, &cleaned));
    }

  private:
    void add(const at::Tensor &param, const std::vector<Tensors> &all, size_t i, bool is_second,
             const std::string &label) {
        Plan &plan = *plan_of(handle);
        const c10::TensorImpl *impl = param.unsafeGetTensorImpl();
        of_dtype dtype = OF_FLOAT32;
        dtype_of(impl, &dtype);
        add_slot(plan, param, 0, false, place_of(impl, dtype), label);
        std::vector<std::optional<at::Tensor>> state;
        for (const Tensors &one : all)
            state.push_back(one.empty() ? std::nullopt : std::optional(one[i]));
        set_state(*plan.slots.back(), state, counter_of(*plan.rule, param, is_second), true);
    }

    // The second parameter of a size has its counter on the GPU, if kernels read it there.
    static std::optional<at::Tensor> counter_of(const of_rule &rule, const at::Tensor &param,
                                                bool is_second) {
        if (!rule.counts)
            return std::nullopt;
        const bool is_there = is_second && rule.prepare_gpu == nullptr;
        return at::zeros({}, is_there ? param.options().dtype(at::kFloat) : at::kFloat);
    }

    of_shim_plan *handle = nullptr;
};

Tensors train(const Tried &tried) {
    TrialNumbers numbers(tried.there);
    const Tensors params = numbers.next();
    Trial trial(tried, params);
    for (int step = 1; step <= kSteps; step++) {
        const Tensors grads = numbers.next();
        for (size_t i = 0; i < params.size(); i++)
            params[i].mutable_grad() = grads[i];
        if (step == kSteps)
            trial.clip(at::full({}, kClipped, tried.there));
        trial.step();
    }
    trial.flush();
    return params;
}

// The largest difference, relative to the number or to how far it has come; 0 only for equal
// numbers. In 16 bits a root can become 0 and a parameter infinite or NaN, on both sides.
double distance(const at::Tensor &ours, const at::Tensor &theirs, const at::Tensor &start) {
    const auto wide = [](const at::Tensor &t) { return t.cpu().to(at::kDouble); };
    const at::Tensor x = wide(ours), y = wide(theirs), way = y.sub(wide(start));
    const at::Tensor same = x.eq(y).logical_or(x.isnan().logical_and(y.isnan()));
    const at::Tensor off = x.sub(y).abs().div(y.abs().maximum(way.abs()).clamp_min(1e-3));
    return off.masked_fill(same, 0.0).max().item().toDouble();
}

// Raises if nothing was compared, or if the update is off by more than rounding.
void check_distance(double worst, const Tensors &theirs, const Tried &tried) {
    const std::string where = "optfuse: " + tried.label + " is on " + tried.there.device().str();
    if (theirs.back().isnan().all().item().toBool())
        fail(where +
             ", where a trial of the update ended in nothing but NaN and compared nothing; nothing "
             "was fused. Mend the optimizer's options, or keep it as it is");
    const at::ScalarType dtype = c10::typeMetaToScalarType(tried.there.dtype());
    // Another last bit of an average in bfloat16 makes as much of a difference as in bfloat16.
    if (worst <= tolerance(tried.mixed ? at::kBFloat16 : dtype))
        return;
    std::ostringstream text;
    text << where << ", where the update for " << dtype
         << (tried.mixed ? " with BFloat16 state" : "") << " is off by a relative " << worst
         << " from " << gpu_reference(tried.rule.name).name
         << ", far more than rounding; nothing was fused. Keep the optimizer as it "
         << "is, and please report the GPU, the driver and the release of torch";
    fail(text.str());
}

// State that is made late may be met while a graph is captured, where nothing can be compared.
void refuse_capture(const Tried &tried) {
    if (current_stream(tried.there.device().index()).capture != 0)
        fail("optfuse: the update of " + tried.label +
             " has not been compared with PyTorch's on this GPU yet, which can't be done while a "
             "CUDA graph is captured; take a step() before the capture. Nothing was updated");
}

bool compare(const Tried &tried) {
    const PlainMode plain;
    refuse_capture(tried);
    const Tensors ours = train(tried);
    const Tensors theirs = train_by_reference(tried), start = TrialNumbers(tried.there).next();
    double worst = 0.0;
    for (size_t i = 0; i < ours.size(); i++) {
        const double d = distance(ours[i], theirs[i], start[i]);
        worst = d <= worst ? worst : d; // NaN is worse
    }
    check_distance(worst, theirs, tried);
    return worst != 0.0;
}

using Kind = std::tuple<std::string, std::vector<double>, at::ScalarType, bool, c10::DeviceIndex>;

} // namespace

bool gpu_bits_differ(const of_rule &rule, std::vector<double> hyper, at::TensorOptions there,
                     const std::string &label, bool mixed) {
    static std::mutex lock; // guards known
    static auto *known = new std::map<Kind, bool>;
    for (size_t i = 0; i < rule.n_hyper; i++) // a schedule is no other kind
        if (std::strcmp(rule.hyper[i], "lr") == 0)
            hyper[i] = 1e-2;
    const Kind kind{rule.name, hyper, c10::typeMetaToScalarType(there.dtype()), mixed,
                    there.device().index()};
    const std::lock_guard<std::mutex> guard(lock);
    const auto found = known->find(kind);
    if (found != known->end())
        return found->second;
    return (*known)[kind] = compare({rule, hyper, there, label, mixed});
}

} // namespace optfuse
