// SPDX-License-Identifier: BSD-3-Clause
// pointwise.cpp: PyTorch's CUDA operators on one tensor, where they round otherwise than the
// CPU's: what kernels/cuda/program.cu has to equal, written without it. Computed in float for 16
// bits and rounded once, a product that goes into a sum fused with it, a tensor divided by a
// number multiplied by the number's reciprocal. Operands of other shapes, dtypes or devices, and
// what is not here, go the CPU's way (fallback.cpp), and so does everything until
// fakecuda.round_as_cuda(): what a model computes has the bits of the CPU then.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>

#include "aliases.h"
#include "graphs.h"

namespace fake {
namespace {

// A tensor like the result, or a number; neither: it was not given.
struct Operand {
    at::Tensor tensor;
    double number = 0;
    bool is_number = false;
};

struct Operands {
    std::vector<Operand> of; // tensors, then the operator's scalars, in the schema's order
    at::Tensor out;
    bool plain = true; // this file has the operator for them
};

bool is_like(const at::Tensor &tensor, const at::Tensor &out) {
    return is_mine(tensor) && tensor.dtype() == out.dtype() && tensor.sizes() == out.sizes() &&
           tensor.strides() == out.strides();
}

Operand operand_of(const c10::IValue &value, Operands *all) {
    Operand made;
    if (value.isNone())
        return made;
    if (!value.isTensor()) {
        made.is_number = value.isScalar() && !value.toScalar().isComplex();
        all->plain = all->plain && made.is_number;
        made.number = made.is_number ? value.toScalar().toDouble() : 0;
        return made;
    }
    const at::Tensor &tensor = value.toTensor();
    if (is_like(tensor, all->out)) {
        made.tensor = tensor;
    } else if (tensor.device().is_cpu() && tensor.dim() == 0 && !tensor.is_complex()) {
        made.is_number = true;
        made.number = tensor.item<double>();
    } else {
        all->plain = false;
    }
    return made;
}

// The output of an operator with out=, its last argument.
Operands operands_of(const torch::jit::Stack &stack, size_t n) {
    Operands all;
    all.out = stack.back().toTensor();
    all.plain = is_mine(all.out) && all.out.is_non_overlapping_and_dense() &&
                (at::isReducedFloatingType(all.out.scalar_type()) ||
                 all.out.scalar_type() == at::kFloat || all.out.scalar_type() == at::kDouble);
    for (size_t i = stack.size() - n; all.plain && i + 1 < stack.size(); i++)
        all.of.push_back(operand_of(stack[i], &all));
    return all;
}

// One element's operands in the type of the computation.
template <class Stored> struct Element {
    using Real = at::opmath_type<Stored>;
    const Operands &all;
    int64_t at;
    bool given(size_t i) const { return is_number(i) || all.of[i].tensor.defined(); }
    bool is_number(size_t i) const { return all.of[i].is_number; }
    Real operator[](size_t i) const {
        const Operand &of = all.of[i];
        return of.is_number ? static_cast<Real>(of.number)
                            : static_cast<Real>(static_cast<const Stored *>(
                                  of.tensor.const_data_ptr())[at]);
    }
    static Real stored(Real x) { return static_cast<Real>(static_cast<Stored>(x)); }
};

// Formulas of one element; `fits` says of which operands.
struct Any {
    static bool fits(const Operands &) { return true; }
};
template <int sign> struct Plus : Any {
    template <class E> static auto of(const E &e) { return std::fma(e[1], sign * e[2], e[0]); }
};
struct Times : Any {
    template <class E> static auto of(const E &e) { return e[0] * e[1]; }
};
struct By : Any {
    template <class E> static auto of(const E &e) {
        if (e.is_number(1)) // its reciprocal is made in double
            return e[0] * static_cast<typename E::Real>(1 / e.all.of[1].number);
        return e.stored(e[0]) / e[1];
    }
};
struct PlusProduct : Any {
    template <class E> static auto of(const E &e) {
        return e[3] == 1 ? std::fma(e[1], e[2], e[0]) : std::fma(e[3], e[1] * e[2], e[0]);
    }
};
struct PlusQuotient : Any {
    template <class E> static auto of(const E &e) {
        return e[3] == 1 ? e[0] + e[1] / e[2] : std::fma(e[3], e[1] / e[2], e[0]);
    }
};
struct Towards : Any {
    template <class E> static auto of(const E &e) {
        const auto way = e[1] - e[0];
        return std::abs(e[2]) < 0.5 ? std::fma(e[2], way, e[0]) : std::fma(-way, 1 - e[2], e[1]);
    }
};
struct Root : Any {
    template <class E> static auto of(const E &e) { return std::sqrt(e[0]); }
};
struct InverseRoot : Any { // by an approximation, on a real one
    template <class E> static auto of(const E &e) { return 1 / std::sqrt(e[0]); }
};
struct Inverse : Any {
    template <class E> static auto of(const E &e) { return 1 / e[0]; }
};
// Products are rounded one by one.
struct Power {
    static bool fits(const Operands &all) {
        const double n = all.of[1].number;
        return n == 2 || n == 3 || n == 0.5 || n == -0.5 || n == -1 || n == -2;
    }
    template <class E> static auto of(const E &e) {
        const auto x = e[0], n = e[1], square = e.stored(x * x);
        if (std::abs(n) == static_cast<decltype(n)>(0.5))
            return n > 0 ? std::sqrt(x) : 1 / std::sqrt(x);
        return n == 2 ? square : n == 3 ? square * x : n == -1 ? 1 / x : 1 / square;
    }
};
// NaN where one of them is, and a zero's sign counts.
template <int sign> struct Extreme : Any {
    template <class E> static auto of(const E &e) {
        const auto x = e[0], y = e[1];
        if (std::isnan(x) || std::isnan(y))
            return std::isnan(x) ? x : y;
        if (x == y)
            return std::signbit(x) == (sign > 0) ? y : x;
        return (x > y) == (sign > 0) ? x : y;
    }
};
template <class T> T raised(T x, T low) { return x < low ? low : x; }
template <class T> T lowered(T x, T high) { return high < x ? high : x; }
struct Between : Any { // of numbers or of tensors
    template <class E> static auto of(const E &e) {
        auto x = e[0];
        if (std::isnan(x))
            return x;
        for (const size_t i : {1, 2})
            if (e.given(i) && !e.is_number(i) && std::isnan(e[i]))
                return e[i];
        x = e.given(1) ? raised(x, e[1]) : x;
        return e.given(2) ? lowered(x, e[2]) : x;
    }
};
template <int sign> struct Limit : Any {
    template <class E> static auto of(const E &e) {
        return std::isnan(e[0]) ? e[0] : sign > 0 ? raised(e[0], e[1]) : lowered(e[0], e[1]);
    }
};

template <class Formula> void compute(const std::string &name, const Operands &all) {
    const auto device = static_cast<c10::DeviceIndex>(all.out.get_device());
    std::vector<Range> ranges;
    for (const Operand &operand : all.of)
        if (operand.tensor.defined() && !operand.tensor.is_same(all.out))
            ranges.push_back(arrived(operand.tensor, false, device));
    ranges.push_back(arrived(all.out, true, device));
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, all.out.scalar_type(), "pointwise", [&] {
            auto *to = static_cast<scalar_t *>(all.out.mutable_data_ptr());
            for (int64_t i = 0; i < all.out.numel(); i++)
                to[i] = static_cast<scalar_t>(Formula::of(Element<scalar_t>{all, i}));
        });
    launch(current_stream(device), name, ranges);
}

template <class Formula> void boxed(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    if (!rounds_as_cuda()) {
        fallback(op, stack);
        return;
    }
    const size_t n = op.schema().arguments().size();
    const Operands all = operands_of(*stack, n);
    if (!all.plain || !Formula::fits(all)) {
        fallback(op, stack);
        return;
    }
    compute<Formula>(op.schema().name(), all);
    torch::jit::drop(*stack, n);
    stack->emplace_back(all.out);
}

std::atomic<bool> as_cuda{false};

template <class Formula> void put(torch::Library &m, const char *name) {
    m.impl(name, recorded(c10::KernelFunction::makeFromBoxedFunction<&boxed<Formula>>()));
}

} // namespace

bool rounds_as_cuda() { return as_cuda.load(); }

} // namespace fake

using namespace fake;

TORCH_LIBRARY_FRAGMENT(fakecuda, m) {
    m.def("set_rounds_as_cuda(bool on) -> ()", [](bool on) { as_cuda.store(on); });
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    put<Plus<1>>(m, "add.out");
    put<Plus<-1>>(m, "sub.out");
    put<Times>(m, "mul.out");
    put<By>(m, "div.out");
    put<PlusProduct>(m, "addcmul.out");
    put<PlusQuotient>(m, "addcdiv.out");
    put<Towards>(m, "lerp.Scalar_out");
    put<Towards>(m, "lerp.Tensor_out");
    put<Root>(m, "sqrt.out");
    put<InverseRoot>(m, "rsqrt.out");
    put<Inverse>(m, "reciprocal.out");
    put<Power>(m, "pow.Tensor_Scalar_out");
    put<Extreme<1>>(m, "maximum.out");
    put<Extreme<-1>>(m, "minimum.out");
    put<Between>(m, "clamp.out");
    put<Between>(m, "clamp.Tensor_out");
    put<Limit<1>>(m, "clamp_min.out");
    put<Limit<-1>>(m, "clamp_max.out");
    put<Extreme<1>>(m, "clamp_min.Tensor_out");
    put<Extreme<-1>>(m, "clamp_max.Tensor_out");
}
