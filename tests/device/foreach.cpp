// SPDX-License-Identifier: BSD-3-Clause
// foreach.cpp: the multi-tensor functions that torch.optim calls by default on GPUs,
// with the roundings that PyTorch's CUDA has (docs/numerics.md): computed in float
// for 16 bits, rounded once a function, a product that goes into a sum fused with
// it. So torch.optim on this device is what kernels/cuda/op_by_op.cu has to equal, and
// is written without it. What is not here PyTorch composes of the CPU's operators.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/COW.h>
#include <torch/library.h>

#include <cmath>

#include "aliases.h"
#include "graphs.h"

namespace fake {
namespace {

using List = at::TensorList;
using Tensors = std::vector<at::Tensor>;
using Scalar = const at::Scalar &;
using Scalars = at::ArrayRef<at::Scalar>;

// The numbers of a call: one for all tensors, or one for each.
struct Numbers {
    std::vector<double> all;
    Numbers(double number) : all{number} {}
    Numbers(Scalar number) : all{number.toDouble()} {}
    Numbers(Scalars numbers) {
        for (const at::Scalar &number : numbers)
            all.push_back(number.toDouble());
    }
    double of(size_t tensor) const { return all.size() == 1 ? all[0] : all[tensor]; }
};

// The tensor as the result lies in memory, which is PyTorch's fast way; a copy of what
// has another shape, order, dtype or device.
at::Tensor in_order_of(const at::Tensor &out, const List &list, size_t i) {
    if (list.empty())
        return {};
    TORCH_CHECK(out.is_non_overlapping_and_dense() && is_mine(out),
                "the fake device's multi-tensor functions change no such tensors");
    const at::Tensor &in = list[i];
    const bool same = is_mine(in) && in.dtype() == out.dtype() && in.sizes() == out.sizes() &&
                      in.strides() == out.strides();
    return same ? in : at::empty_like(out).copy_(in);
}

template <class T> const T *read(const at::Tensor &tensor) {
    return tensor.defined() ? static_cast<const T *>(tensor.const_data_ptr()) : nullptr;
}

// out = formula(self, a, b, number), in the type of the computation.
template <class Formula>
void run(const char *name, List out, List self, List a, List b, const Numbers &numbers,
         Formula formula) {
    const auto device = static_cast<c10::DeviceIndex>(self[0].get_device());
    std::vector<Range> ranges;
    Tensors used; // copies live until they have been reported
    for (size_t i = 0; i < self.size(); i++) {
        const at::Tensor in[] = {in_order_of(out[i], self, i), in_order_of(out[i], a, i),
                                 in_order_of(out[i], b, i)};
        for (const at::Tensor &tensor : in)
            if (tensor.defined() && !tensor.is_same(out[i])) {
                ranges.push_back(arrived(tensor, false, device));
                used.push_back(tensor);
            }
        ranges.push_back(arrived(out[i], true, device));
        AT_DISPATCH_FLOATING_TYPES_AND2(
            at::kHalf, at::kBFloat16, self[i].scalar_type(), "multi_tensor", [&] {
                using Real = at::opmath_type<scalar_t>;
                const auto number = static_cast<Real>(numbers.of(i));
                const scalar_t *x = read<scalar_t>(in[0]), *y = read<scalar_t>(in[1]),
                               *z = read<scalar_t>(in[2]);
                // As PyTorch's CUDA asks for it, which so writes to memory that copies on write.
                auto *to = const_cast<scalar_t *>(read<scalar_t>(out[i]));
                for (int64_t k = 0; k < out[i].numel(); k++)
                    to[k] = static_cast<scalar_t>(formula(Real(x[k]), y ? Real(y[k]) : Real(0),
                                                          z ? Real(z[k]) : Real(0), number));
            });
    }
    launch(current_stream(device), name, ranges);
}

// Numbers on the device, as with capturable=True, become as large as what they go with.
Tensors like(List self, List a) {
    Tensors made;
    for (size_t i = 0; i < self.size(); i++) {
        const bool number = !a.empty() && self[i].dim() == 0;
        made.push_back(at::empty_like(number ? a[i] : self[i]));
    }
    return made;
}

// In place, where the kernels themselves raise the versions, as PyTorch's CUDA has it; and with a
// result of its own.
template <class Formula>
void in_place(const char *name, List self, List a, List b, const Numbers &n, Formula f) {
    run(name, self, self, a, b, n, f);
    for (const at::Tensor &tensor : self)
        tensor.unsafeGetTensorImpl()->bump_version();
}
template <class Formula>
Tensors made(const char *name, List self, List a, List b, const Numbers &n, Formula f) {
    Tensors out = like(self, a);
    run(name, out, self, a, b, n, f);
    return out;
}

// The formulas. x is the tensor that is changed, or would be.
const auto negate = [](auto x, auto, auto, auto) { return -x; };
const auto absolute = [](auto x, auto, auto, auto) { return std::abs(x); };
const auto root = [](auto x, auto, auto, auto) { return std::sqrt(x); };
const auto invert = [](auto x, auto, auto, auto) { return 1 / x; };
const auto sign = [](auto x, auto, auto, auto n) { return decltype(n)((x > 0) - (x < 0)); };
const auto plus_number = [](auto x, auto, auto, auto n) { return x + n; };
const auto times_number = [](auto x, auto, auto, auto n) { return x * n; };
const auto by_number = [](auto x, auto, auto, auto n) { return x / n; };
const auto plus = [](auto x, auto y, auto, auto n) { return std::fma(n, y, x); };
const auto times = [](auto x, auto y, auto, auto) { return x * y; };
const auto by = [](auto x, auto y, auto, auto) { return x / y; };
const auto larger = [](auto x, auto y, auto, auto) { return x != x || x > y ? x : y; };
const auto smaller = [](auto x, auto y, auto, auto) { return x != x || x < y ? x : y; };
const auto plus_product = [](auto x, auto y, auto z, auto n) {
    return n == 1 ? std::fma(y, z, x) : std::fma(n, y * z, x);
};
const auto plus_quotient = [](auto x, auto y, auto z, auto n) {
    return n == 1 ? x + y / z : std::fma(n, y / z, x);
};
const auto towards = [](auto x, auto y, auto, auto n) {
    return std::abs(n) < 0.5 ? std::fma(n, y - x, x) : std::fma(-(y - x), 1 - n, y);
};

// By a number on the device, as clipping does: what copies on write as PyTorch's CUDA does it, all
// else one by one.
void times_tensor(List self, const at::Tensor &number) {
    for (const at::Tensor &tensor : self) {
        const bool copies = c10::impl::cow::is_cow_data_ptr(tensor.storage().data_ptr());
        if (copies && tensor.dtype() == number.dtype())
            in_place("aten::_foreach_mul_", {tensor}, {number.expand_as(tensor)}, {}, 1.0, times);
        else
            tensor.mul_(number);
    }
}

} // namespace
} // namespace fake

using namespace fake;

#define UNARY(NAME, FORMULA)                                                                       \
    m.impl(NAME, [](List x) { return made("aten::" NAME, x, {}, {}, 0.0, FORMULA); });             \
    m.impl(NAME "_", [](List x) { in_place("aten::" NAME "_", x, {}, {}, 0.0, FORMULA); });
#define ONE_NUMBER(NAME, FORMULA)                                                                  \
    m.impl(NAME ".Scalar",                                                                         \
           [](List x, Scalar n) { return made("aten::" NAME, x, {}, {}, n, FORMULA); });           \
    m.impl(NAME "_.Scalar",                                                                        \
           [](List x, Scalar n) { in_place("aten::" NAME "_", x, {}, {}, n, FORMULA); });
#define NUMBERS(NAME, FORMULA)                                                                     \
    m.impl(NAME ".ScalarList",                                                                     \
           [](List x, Scalars n) { return made("aten::" NAME, x, {}, {}, n, FORMULA); });          \
    m.impl(NAME "_.ScalarList",                                                                    \
           [](List x, Scalars n) { in_place("aten::" NAME "_", x, {}, {}, n, FORMULA); });
#define LIST(NAME, FORMULA)                                                                        \
    m.impl(NAME ".List",                                                                           \
           [](List x, List y) { return made("aten::" NAME, x, y, {}, 1.0, FORMULA); });            \
    m.impl(NAME "_.List",                                                                          \
           [](List x, List y) { in_place("aten::" NAME "_", x, y, {}, 1.0, FORMULA); });
#define POINTWISE(NAME, FORMULA)                                                                   \
    m.impl(NAME ".Scalar", [](List x, List y, List z, Scalar n) {                                  \
        return made("aten::" NAME, x, y, z, n, FORMULA);                                           \
    });                                                                                            \
    m.impl(NAME "_.Scalar", [](List x, List y, List z, Scalar n) {                                 \
        in_place("aten::" NAME "_", x, y, z, n, FORMULA);                                          \
    });                                                                                            \
    m.impl(NAME "_.ScalarList", [](List x, List y, List z, Scalars n) {                            \
        in_place("aten::" NAME "_", x, y, z, n, FORMULA);                                          \
    });

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    RecordedLibrary m{library};
    UNARY("_foreach_neg", negate)
    UNARY("_foreach_abs", absolute)
    UNARY("_foreach_sqrt", root)
    UNARY("_foreach_reciprocal", invert)
    UNARY("_foreach_sign", sign)
    ONE_NUMBER("_foreach_add", plus_number)
    NUMBERS("_foreach_add", plus_number)
    ONE_NUMBER("_foreach_mul", times_number)
    NUMBERS("_foreach_mul", times_number)
    NUMBERS("_foreach_div", by_number)
    // By the number's reciprocal, which is made in double.
    m.impl("_foreach_div.Scalar", [](List x, Scalar n) {
        return made("aten::_foreach_div", x, {}, {}, 1 / n.toDouble(), times_number);
    });
    m.impl("_foreach_div_.Scalar", [](List x, Scalar n) {
        in_place("aten::_foreach_div_", x, {}, {}, 1 / n.toDouble(), times_number);
    });
    LIST("_foreach_mul", times)
    m.impl("_foreach_mul_.Tensor", times_tensor);
    LIST("_foreach_div", by)
    LIST("_foreach_maximum", larger)
    LIST("_foreach_minimum", smaller)
    m.impl("_foreach_add.List",
           [](List x, List y, Scalar n) { return made("aten::_foreach_add", x, y, {}, n, plus); });
    m.impl("_foreach_add_.List",
           [](List x, List y, Scalar n) { in_place("aten::_foreach_add_", x, y, {}, n, plus); });
    m.impl("_foreach_lerp_.Scalar", [](List x, List y, Scalar n) {
        in_place("aten::_foreach_lerp_", x, y, {}, n, towards);
    });
    POINTWISE("_foreach_addcmul", plus_product)
    POINTWISE("_foreach_addcdiv", plus_quotient)
}
