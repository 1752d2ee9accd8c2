// SPDX-License-Identifier: BSD-3-Clause
// averages.cpp: see averages.h; and the operator by which Python asks for it.
#include "averages/averages.h"

#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/add.h>
#include <ATen/ops/div.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/sub.h>
#include <torch/library.h>

#include <string>
#include <utility>

#include "base/compat.h"
#include "base/error.h"
#include "base/threads.h"
#include "guard.h"
#include "memory/memory.h"
#include "memory/written.h"
#include "plan/arguments.h"
#include "plan/references.h"
#include "plan/refuse.h"
#include "python/gil.h"

namespace optfuse {
namespace {

bool is_dense_like(const c10::TensorImpl *a, const c10::TensorImpl *p) {
    return a->dtype() == p->dtype() && a->device() == p->device() &&
           equal(a->sizes(), p->sizes()) && equal(a->strides(), p->strides()) &&
           a->is_non_overlapping_and_dense() && a->numel() != 0;
}

// is_averaged_alike(), asked once for each dtype of a call.
class AlikeByDtype {
  public:
    explicit AlikeByDtype(const Averaging &of) : how(of) {}
    bool operator()(at::ScalarType dtype) {
        if (last != dtype) {
            last = dtype;
            answer = is_averaged_alike(how, dtype);
        }
        return answer;
    }

  private:
    const Averaging &how;
    at::ScalarType last = at::ScalarType::Undefined;
    bool answer = false;
};

// Whether they are for average_by_operators() at least.
bool are_on_cpu(const std::vector<at::Tensor> &averages, const std::vector<at::Tensor> &params) {
    of_dtype dtype;
    for (size_t i = 0; i < params.size(); i++) {
        const c10::TensorImpl *a = averages[i].unsafeGetTensorImpl(),
                              *p = params[i].unsafeGetTensorImpl();
        if (!a->device().is_cpu() || !p->device().is_cpu() || a->dtype() != p->dtype() ||
            !dtype_of(a, &dtype))
            return false;
    }
    return true;
}

// Whether a launch may write the average: nobody else knows its memory.
bool can_wait(const at::Tensor &average, const at::Tensor &param, of_dtype *dtype) {
    c10::TensorImpl *a = average.unsafeGetTensorImpl(), *p = param.unsafeGetTensorImpl();
    return a->layout() == c10::kStrided && a->has_storage() && a->device().is_cpu() &&
           dtype_of(a, dtype) && p->has_storage() && is_dense_like(a, p) && !is_lazy(a) &&
           !a->is_inference() && !has_mark(a) && has_mark(p) &&
           (is_private(storage_of(a), 0) || !OF_GUARD(average_alias));
}

bool wait(const at::Tensor &average, const at::Tensor &param,
          const std::shared_ptr<const Program> &program) {
    of_average item = {};
    if (!can_wait(average, param, &item.dtype))
        return false;
    const c10::TensorImpl *a = average.unsafeGetTensorImpl();
    DeferredAverage deferred{average, program};
    item.param_key = storage_of(param.unsafeGetTensorImpl());
    item.key = storage_of(a);
    item.memory = written_data_of(a);
    item.numel = a->numel();
    item.program = &program->core;
    item.host = &deferred;
    if (!of_average_behind(&item))
        return false;
    average.unsafeGetTensorImpl()->bump_version();
    return true;
}

} // namespace

std::shared_ptr<const Program> program_of(const Averaging &how) {
    constexpr unsigned char kAverage = OF_REGISTER_PARAM, kWeight = OF_REGISTER_GRAD;
    constexpr unsigned char kFirst = OF_REGISTER_TEMPORARY, kSecond = kFirst + 1;
    std::vector<of_instruction> code;
    const auto line = [&](of_operator of, unsigned char to, unsigned char a, unsigned char b,
                          double s) {
        code.push_back({static_cast<unsigned char>(of), to, a, b, 0, s, 0});
    };
    switch (how.formula) {
    case Formula::LERP:
        line(OF_OPERATOR_lerp, kAverage, kAverage, kWeight, how.take);
        break;
    case Formula::WEIGHTED:
        line(OF_OPERATOR_mul_number, kFirst, kAverage, 0, how.keep);
        line(OF_OPERATOR_mul_number, kSecond, kWeight, 0, how.take);
        line(OF_OPERATOR_add, kAverage, kFirst, kSecond, 1);
        break;
    default:
        line(OF_OPERATOR_add, kFirst, kWeight, kAverage, -1);
        line(OF_OPERATOR_div_number, kFirst, kFirst, 0, how.take);
        line(OF_OPERATOR_add, kAverage, kAverage, kFirst, 1);
        break;
    }
    return make_program(std::move(code));
}

void average_by_operators(const std::vector<at::Tensor> &averages,
                          const std::vector<at::Tensor> &weights, const Averaging &how) {
    if (how.formula == Formula::LERP)
        return averages.empty() ? void() : at::_foreach_lerp_(averages, weights, how.take);
    const at::Tensor count =
        at::scalar_tensor(static_cast<int64_t>(how.take), at::kLong); // of MEAN
    for (size_t i = 0; i < averages.size(); i++) {
        const at::Tensor &a = averages[i], &w = weights[i];
        a.copy_(how.formula == Formula::WEIGHTED
                    ? at::add(at::mul(a, how.keep), at::mul(w, how.take))
                    : at::add(a, at::div(at::sub(w, a), count)));
    }
}

int64_t average(const std::vector<at::Tensor> &averages, const std::vector<at::Tensor> &params,
                const Averaging &how) {
    if (averages.size() != params.size())
        fail("optfuse: an average for each parameter");
    if (!are_on_cpu(averages, params))
        return -1;
    const c10::AutoGradMode no_grad(false);
    const std::shared_ptr<const Program> program = program_of(how);
    std::vector<at::Tensor> now, of;
    AlikeByDtype is_alike(how);
    // There PyTorch's scalar lerp has a zero of another sign than its vectors, between threads too.
    const bool is_copy = how.formula == Formula::LERP && static_cast<float>(how.take) == 1.0f;
    for (size_t i = 0; i < params.size(); i++)
        if (is_copy || !is_alike(params[i].scalar_type()) ||
            !wait(averages[i], params[i], program)) {
            now.push_back(averages[i]);
            of.push_back(params[i]);
        }
    average_by_operators(now, of, how);
    for (const at::Tensor &each : averages)
        set_threads_as_operators(each.numel());
    return static_cast<int64_t>(params.size() - now.size());
}

namespace {

int64_t average_from_python(std::vector<at::Tensor> averages, std::vector<at::Tensor> params,
                            int64_t formula, double keep, double take) {
    refuse_fake_tensors("weights are averaged");
    if (formula < 0 || formula >= static_cast<int64_t>(Formula::COUNT))
        fail("optfuse: no formula number " + std::to_string(formula));
    const int64_t waiting = average(averages, params, {static_cast<Formula>(formula), keep, take});
    let_go(std::move(averages));
    let_go(std::move(params));
    return waiting;
}

} // namespace
} // namespace optfuse

TORCH_LIBRARY_FRAGMENT(optfuse, m) {
    m.def("average(Tensor[] averages, Tensor[] params, int formula, float keep, float take) -> int",
          optfuse::average_from_python);
    // Else the first use of the weights would launch their updates.
    m.impl("average", torch::dispatch(optfuse::kPendingKey, optfuse::average_from_python));
}
