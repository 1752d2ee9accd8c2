// SPDX-License-Identifier: BSD-3-Clause
// fused.cpp: stock's fused optimizers on this device. They compute what
// PyTorch's CUDA kernels do, by the plain C rows of that reference
// (docs/numerics.md), so that torch.optim with fused=True is what optfuse has
// to equal bit for bit.
#include <torch/library.h>

#include <cmath>
#include <cstring>

#include "aliases.h"
#include "graphs.h"
#include "kernels.h"
#include "powers.h"

namespace fake {
namespace {

using List = at::TensorList;
using Maybe = const std::optional<at::Tensor> &;

enum { MAJOR = 9 }; // the chip's compute capability, as host_driver.c has it

// One call of an optimizer, for all its tensors.
struct Call {
    const char *rule, *name;
    List params, grads;
    std::vector<List> state; // in the rule's order; unused ones are empty
    List steps;              // or empty, and `first` says it
    of_cuda_scalars scalars;
    double beta1, beta2;
    at::Tensor lr, grad_scale, found_inf; // undefined if not on the device
};

const void *data_of(const at::Tensor &tensor) {
    return tensor.storage().data() == nullptr ? nullptr : tensor.const_data_ptr();
}
void *data_to(const at::Tensor &tensor) {
    return data_of(tensor) == nullptr ? nullptr : tensor.mutable_data_ptr();
}

float float_at(const at::Tensor &tensor) {
    float value = 0;
    std::memcpy(&value, data_of(tensor), sizeof value);
    return value;
}

of_dtype dtype_of(const at::Tensor &tensor) {
    switch (tensor.scalar_type()) {
    case c10::ScalarType::Float:
        return OF_FLOAT32;
    case c10::ScalarType::Double:
        return OF_FLOAT64;
    case c10::ScalarType::BFloat16:
        return OF_BFLOAT16;
    case c10::ScalarType::Half:
        return OF_FLOAT16;
    default:
        TORCH_CHECK(false, "no fused optimizer for ", tensor.dtype());
    }
}

// Whether the state is bfloat16 and the parameters are float32. Raises for what PyTorch refuses
// (validate_mixed_precision_dtypes() of fused_adam_utils.cuh), but that a list may have two dtypes.
bool is_mixed(const Call &call) {
    const c10::ScalarType param = call.params[0].scalar_type();
    const bool mixed = !call.state.empty() && !call.state[0].empty() &&
                       call.state[0][0].scalar_type() != param;
    TORCH_CHECK(!mixed || param == at::kFloat, "requires float32 params, got ", param);
    for (const List &list : call.state)
        for (const at::Tensor &tensor : list)
            TORCH_CHECK(tensor.scalar_type() == (mixed ? at::kBFloat16 : param),
                        "requires optimizer states of another dtype than ", tensor.scalar_type());
    return mixed;
}

// The device computes powers and roots in the type of the computation; those of mixed dtypes in
// double.
double correction(of_dtype dtype, double beta, float step) {
    if (dtype == OF_FLOAT64)
        return 1.0 - power(beta, static_cast<double>(step));
    return 1.0f - power(static_cast<float>(beta), step);
}

double square_root(of_dtype dtype, double x) {
    return dtype == OF_FLOAT64 ? std::sqrt(x) : std::sqrt(static_cast<float>(x));
}

// All elements of a tensor are taken in fours, or none.
size_t tail_of(const of_span &span, of_dtype dtype, of_dtype state_dtype) {
    const auto are_in_fours = [](uintptr_t address, of_dtype of) {
        return address % (4 * of_dtype_size(of)) == 0;
    };
    bool all = span.n % 4 == 0 && are_in_fours(reinterpret_cast<uintptr_t>(span.param), dtype) &&
               are_in_fours(reinterpret_cast<uintptr_t>(span.grad), dtype);
    for (const void *state : span.state)
        all = all && are_in_fours(reinterpret_cast<uintptr_t>(state), state_dtype);
    return all ? 0 : span.n;
}

void update(const Call &call, size_t i, bool mixed) {
    const of_dtype dtype = dtype_of(call.params[i]);
    const of_dtype corrected = mixed ? OF_FLOAT64 : dtype;
    of_cuda_scalars s = call.scalars;
    if (!call.steps.empty()) {
        const float step = float_at(call.steps[i]);
        s.first = step <= 1.0f;
        s.correction1 = correction(corrected, call.beta1, step);
        s.correction2 = square_root(corrected, correction(corrected, call.beta2, step));
    }
    of_span span = {};
    span.param = data_to(call.params[i]);
    span.grad = data_of(call.grads[i]);
    span.n = static_cast<size_t>(call.params[i].numel());
    for (size_t j = 0; j < call.state.size(); j++)
        span.state[j] = call.state[j].empty() ? nullptr : data_to(call.state[j][i]);
    span.tail = tail_of(span, dtype, mixed ? OF_BFLOAT16 : dtype);
    if (call.grad_scale.defined())
        s.unscaled = data_to(call.grads[i]);
    const char *const row = mixed ? of_rule_mixed(of_rule_find(call.rule)) : call.rule;
    of_kernel_find(row, OF_REF_CUDA_FUSED, dtype, OF_CPU, OF_ISA_C)->run(&span, &s);
}

void report(const Call &call) {
    std::vector<Range> ranges;
    const auto add = [&](List list, bool write) {
        for (const at::Tensor &tensor : list)
            ranges.push_back(range_of(tensor, write));
    };
    add(call.params, true);
    add(call.grads, call.grad_scale.defined());
    for (const List &list : call.state)
        add(list, true);
    add(call.steps, false);
    for (const at::Tensor &tensor : {call.lr, call.grad_scale, call.found_inf})
        if (tensor.defined())
            ranges.push_back(range_of(tensor, false));
    launch(current_stream(static_cast<c10::DeviceIndex>(call.params[0].get_device())), call.name,
           ranges);
}

void run(Call call, Maybe grad_scale, Maybe found_inf) {
    if (call.params.empty())
        return;
    call.grad_scale = grad_scale.value_or(at::Tensor());
    call.found_inf = found_inf.value_or(at::Tensor());
    const bool mixed = is_mixed(call);
    report(call);
    if (call.lr.defined())
        call.scalars.lr = float_at(call.lr);
    if (call.grad_scale.defined())
        call.scalars.grad_scale = float_at(call.grad_scale);
    call.scalars.early = of_cuda_early(MAJOR, dtype_of(call.params[0]));
    if (call.found_inf.defined() && float_at(call.found_inf) == 1.0f)
        return;
    for (size_t i = 0; i < call.params.size(); i++)
        update(call, i, mixed);
}

// A learning rate on the host is a number.
double rate_of(const at::Tensor &lr) {
    return is_mine(lr) ? 0.0 : lr.item<double>();
}
at::Tensor on_device(const at::Tensor &lr) {
    return is_mine(lr) ? lr : at::Tensor();
}

template <bool decoupled>
void adam(List params, List grads, List m, List v, List most, List steps, double lr, double beta1,
          double beta2, double decay, double eps, bool amsgrad, bool maximize, Maybe grad_scale,
          Maybe found_inf, at::Tensor lr_at = {}) {
    Call call = {"adam",       decoupled ? "aten::_fused_adamw_" : "aten::_fused_adam_",
                 params,       grads,
                 {m, v, most}, steps,
                 {},           beta1,
                 beta2,        std::move(lr_at),
                 {},           {}};
    const double hyper[] = {
        lr, beta1, beta2, eps, decay, double(amsgrad), double(maximize), double(decoupled)};
    std::memcpy(call.scalars.hyper, hyper, sizeof hyper);
    call.scalars.lr = lr;
    run(std::move(call), grad_scale, found_inf);
}

template <bool decoupled>
void adam_scalar(List params, List grads, List m, List v, List most, List steps, double lr,
                 double beta1, double beta2, double decay, double eps, bool amsgrad, bool maximize,
                 Maybe grad_scale, Maybe found_inf) {
    adam<decoupled>(params, grads, m, v, most, steps, lr, beta1, beta2, decay, eps, amsgrad,
                    maximize, grad_scale, found_inf);
}

template <bool decoupled>
void adam_tensor(List params, List grads, List m, List v, List most, List steps,
                 const at::Tensor &lr, double beta1, double beta2, double decay, double eps,
                 bool amsgrad, bool maximize, Maybe grad_scale, Maybe found_inf) {
    adam<decoupled>(params, grads, m, v, most, steps, rate_of(lr), beta1, beta2, decay, eps,
                    amsgrad, maximize, grad_scale, found_inf, on_device(lr));
}

void sgd(List params, List grads, List buffers, double decay, double momentum, double lr,
         double dampening, bool nesterov, bool maximize, bool first, Maybe grad_scale,
         Maybe found_inf, at::Tensor lr_at) {
    Call call = {"sgd", "aten::_fused_sgd_", params, grads, {buffers}, {}, {}, 0,
                 0,     std::move(lr_at),    {},     {}};
    const double hyper[] = {lr, momentum, dampening, decay, double(nesterov), double(maximize)};
    std::memcpy(call.scalars.hyper, hyper, sizeof hyper);
    call.scalars.lr = lr;
    call.scalars.first = first;
    run(std::move(call), grad_scale, found_inf);
}

void sgd_scalar(List params, List grads, List buffers, double decay, double momentum, double lr,
                double dampening, bool nesterov, bool maximize, bool first, Maybe grad_scale,
                Maybe found_inf) {
    sgd(params, grads, buffers, decay, momentum, lr, dampening, nesterov, maximize, first,
        grad_scale, found_inf, {});
}

void sgd_tensor(List params, List grads, List buffers, double decay, double momentum,
                const at::Tensor &lr, double dampening, bool nesterov, bool maximize, bool first,
                Maybe grad_scale, Maybe found_inf) {
    sgd(params, grads, buffers, decay, momentum, rate_of(lr), dampening, nesterov, maximize, first,
        grad_scale, found_inf, on_device(lr));
}

} // namespace
} // namespace fake

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    fake::RecordedLibrary m{library};
    m.impl("_fused_adam_", fake::adam_scalar<false>);
    m.impl("_fused_adam_.tensor_lr", fake::adam_tensor<false>);
    m.impl("_fused_adamw_", fake::adam_scalar<true>);
    m.impl("_fused_adamw_.tensor_lr", fake::adam_tensor<true>);
    m.impl("_fused_sgd_", fake::sgd_scalar);
    m.impl("_fused_sgd_.tensor_lr", fake::sgd_tensor);
}
