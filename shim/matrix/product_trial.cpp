// SPDX-License-Identifier: BSD-3-Clause
// product_trial.cpp: how a product is computed depends on shapes, layouts and scalars, not
// on the numbers. So these may be such that they give away another order of summation.
#include "matrix/product_trial.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros_like.h>

namespace optfuse {
namespace {

std::string compared(const Product &wanted) {
    const at::Tensor expected = by_operators(wanted), out = by_cublas(wanted);
    if (!out.defined())
        return taken_error();
    const bool same = at::equal(out.view(at::kShort), expected.view(at::kShort));
    return same ? "" : "in a trial cuBLAS gave other bits";
}

at::Tensor copy_of(const at::Tensor &x) {
    return at::empty_strided(x.sizes(), x.strides(), x.options()).copy_(x);
}

// So that sums of few terms are rounded, too: their magnitudes go up and down.
at::Tensor magnitudes(int64_t n, const at::Tensor &like) {
    return at::arange(n, like.options().dtype(at::kFloat)).remainder(3).mul(11).exp2();
}

// Each sum is one that is taken away again, from its end: nothing is left but what was
// rounded on the way, in most elements, also where two halves are summed alike. Of random
// numbers another rounding of float's sums is seen in one element of ten thousand, after they
// were rounded to bfloat16.
std::string compared_where_sums_cancel(const Product &wanted) {
    const at::Tensor a = copy_of(wanted.a), b = copy_of(wanted.b);
    const int64_t terms = a.size(1), half = terms / 2;
    a.narrow(1, 0, half).mul_(magnitudes(half, a));
    a.narrow(1, half, half).copy_(a.narrow(1, 0, half).flip({1}));
    b.narrow(0, half, half).copy_(b.narrow(0, 0, half).flip({0}).neg());
    a.narrow(1, 2 * half, terms % 2).zero_();
    const at::Tensor c = wanted.c == nullptr ? at::Tensor() : at::zeros_like(*wanted.c);
    return compared({a, b, wanted.alpha, wanted.c == nullptr ? nullptr : &c, wanted.beta});
}

} // namespace

std::string difference(const Product &wanted) {
    const std::string why = compared(wanted);
    return why.empty() ? compared_where_sums_cancel(wanted) : why;
}

} // namespace optfuse
