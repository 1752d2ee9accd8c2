// SPDX-License-Identifier: BSD-3-Clause
// powers.cpp: a float32 tensor to the power of a number, as PyTorch's CUDA has it: by
// the power that the kernels get that run on this device, and not by the CPU operator's
// own; but for some exponents.
#include "powers.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/pow.h>
#include <torch/library.h>

#include <cmath>

#include "aliases.h"
#include "graphs.h"

namespace fake {

namespace {

float (*narrow_power)(float, float) = std::pow;
double (*wide_power)(double, double) = std::pow;

// Addresses of functions of the library with the kernels.
void set_powers(int64_t narrow, int64_t wide) {
    narrow_power = reinterpret_cast<float (*)(float, float)>(narrow);
    wide_power = reinterpret_cast<double (*)(double, double)>(wide);
}

} // namespace

float power(float x, float exponent) { return narrow_power(x, exponent); }
double power(double x, double exponent) { return wide_power(x, exponent); }

namespace {

float power_of(float x, float exponent) {
    if (exponent == 0.5f)
        return std::sqrt(x);
    if (exponent == -0.5f)
        return 1 / std::sqrt(x);
    if (exponent == -1.0f)
        return 1 / x;
    if (exponent == -2.0f)
        return 1 / (x * x);
    if (exponent == 2.0f)
        return x * x;
    if (exponent == 3.0f)
        return x * x * x;
    return power(x, exponent); // right for 0 and 1, too
}

at::Tensor powers_of(const at::Tensor &x, float exponent) {
    const at::Tensor in = x.contiguous();
    at::Tensor out = at::empty_like(in);
    for (int64_t i = 0; i < in.numel(); i++)
        out.mutable_data_ptr<float>()[i] = power_of(in.const_data_ptr<float>()[i], exponent);
    return out;
}

// Where operators round as CUDA's; those of these exponents go without the library.
bool is_pointwise(const at::Tensor &x, const at::Scalar &exponent) {
    if (!rounds_as_cuda() || exponent.isComplex() || !at::isFloatingType(x.scalar_type()))
        return false;
    for (const double plain : {0.5, -0.5, -1.0, -2.0, 2.0, 3.0})
        if (exponent.toDouble() == plain)
            return true;
    return false;
}

at::Tensor power_of_tensor(const at::Tensor &x, const at::Scalar &exponent) {
    if (is_pointwise(x, exponent)) {
        at::Tensor made = at::empty_like(x);
        return at::pow_out(made, x, exponent);
    }
    Aliases aliases;
    const at::Tensor in = aliases.of(x, Use::read);
    const bool single = in.scalar_type() == at::kFloat && !exponent.isComplex();
    const at::Tensor out =
        aliases.back(single ? powers_of(in, exponent.toFloat()) : at::pow(in, exponent));
    aliases.report("aten::pow");
    return out;
}

} // namespace
} // namespace fake

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    fake::RecordedLibrary{library}.impl("pow.Tensor_Scalar", fake::power_of_tensor);
}
TORCH_LIBRARY_FRAGMENT(fakecuda, m) { m.def("set_powers", fake::set_powers); }
