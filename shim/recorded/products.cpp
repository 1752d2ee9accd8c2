// SPDX-License-Identifier: BSD-3-Clause
#include "recorded/products.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "base/clock.h"
#include "base/plain_mode.h"
#include "guard.h"
#include "memory/memory.h"
#include "memory/trial_matrices.h"

namespace optfuse::recorded {
namespace {

// Larger ones fill the processor by themselves.
constexpr int64_t kMostWork = 1 << 22; // multiplications of one
constexpr int kTimings = 5;

struct Product {
    std::vector<at::Tensor> operands; // addmm()'s self is the first of three
    c10::Scalar beta = 1, alpha = 1;

    bool adds() const { return operands.size() == 3; }
    at::Tensor made() const {
        return adds() ? at::addmm(operands[0], operands[1], operands[2], beta, alpha)
                      : at::mm(operands[0], operands[1]);
    }
};

using Products = std::vector<Product>;

size_t n_operands(const Line &line) { return line.known->name == "addmm" ? 3 : 2; }

Product product_of(const Line &line, const std::vector<c10::IValue> &values) {
    const torch::jit::Stack stack = arguments_of(line, values);
    Product found;
    const size_t n = n_operands(line);
    for (size_t i = 0; i < n; i++)
        found.operands.push_back(stack[i].toTensor());
    if (found.adds()) {
        found.beta = stack[n].toScalar();
        found.alpha = stack[n + 1].toScalar();
    }
    return found;
}

bool is_transposed(const at::Tensor &t) { return !t.is_contiguous(); }

// Its rows, or its columns, lie one after the other.
bool is_dense_matrix(const c10::IValue &value) {
    if (!value.isTensor() || !value.toTensor().defined())
        return false;
    const at::Tensor &t = value.toTensor();
    return t.dim() == 2 && t.device().is_cpu() && t.is_floating_point() && t.numel() != 0 &&
           (t.is_contiguous() || (t.stride(0) == 1 && t.stride(1) == t.size(0)));
}

// The operands in one tensor: as they lie, if that is one after the other.
at::Tensor stacked(const Products &products, size_t operand) {
    std::vector<at::Tensor> all;
    const at::Tensor &first = products[0].operands[operand];
    char *const memory = static_cast<char *>(data_of(first.unsafeGetTensorImpl()));
    bool in_order = true;
    for (const Product &one : products) {
        const at::Tensor &t = one.operands[operand];
        in_order &= data_of(t.unsafeGetTensorImpl()) == memory + all.size() * first.nbytes();
        all.push_back(is_transposed(t) ? t.t() : t);
    }
    if (!in_order) {
        const at::Tensor copy = at::stack(all);
        return is_transposed(first) ? copy.transpose(1, 2) : copy;
    }
    const auto n = static_cast<int64_t>(all.size());
    return at::from_blob(memory, {n, first.size(0), first.size(1)},
                         {first.numel(), first.stride(0), first.stride(1)}, first.options());
}

at::Tensor in_one(const Products &products) {
    const Product &first = products[0];
    if (!first.adds())
        return at::bmm(stacked(products, 0), stacked(products, 1));
    return at::baddbmm(stacked(products, 0), stacked(products, 1), stacked(products, 2), first.beta,
                       first.alpha);
}

std::vector<at::Tensor> one_by_one(const Products &products) {
    std::vector<at::Tensor> made;
    for (const Product &one : products)
        made.push_back(one.made());
    return made;
}

bool have_same_bits(const at::Tensor &batch, const std::vector<at::Tensor> &alone) {
    const char *at = static_cast<const char *>(data_of(batch.unsafeGetTensorImpl()));
    for (const at::Tensor &one : alone) {
        if (std::memcmp(at, data_of(one.unsafeGetTensorImpl()), one.nbytes()) != 0)
            return false;
        at += one.nbytes();
    }
    return batch.is_contiguous();
}

Products of_trial(const Products &like, TrialNumbers numbers, Draws &draws) {
    Products made = like;
    for (Product &one : made)
        for (at::Tensor &operand : one.operands)
            operand = trial_matrix(operand, numbers, draws);
    return made;
}

bool has_bits(const Products &products) {
    Draws draws;
    return std::all_of(kTrialNumbers.begin(), kTrialNumbers.end(), [&](TrialNumbers numbers) {
        const Products tried = of_trial(products, numbers, draws);
        return have_same_bits(in_one(tried), one_by_one(tried));
    });
}

bool is_faster(const Products &products) {
    Draws draws;
    const Products tried = of_trial(products, TrialNumbers::SPREAD, draws);
    double alone = 0, batched = 0;
    for (int i = 0; i < kTimings; i++) {
        const double began = seconds_now();
        one_by_one(tried);
        const double between = seconds_now();
        in_one(tried);
        const double ended = seconds_now();
        alone = i == 0 ? between - began : std::min(alone, between - began);
        batched = i == 0 ? ended - between : std::min(batched, ended - between);
    }
    return batched < alone;
}

// Kernels leave out what is multiplied by 0 or 1.
int64_t class_of(const c10::Scalar &number) {
    const double x = number.toDouble();
    return x == 0 ? 0 : x == 1 ? 1 : 2;
}

using Key = std::vector<int64_t>;

Key key_of(const Products &products) {
    const Product &first = products[0];
    Key key{static_cast<int64_t>(products.size()), class_of(first.beta), class_of(first.alpha)};
    for (const at::Tensor &t : first.operands)
        key.insert(key.end(), {static_cast<int64_t>(t.scalar_type()), t.size(0), t.size(1),
                               t.stride(0), t.stride(1)});
    for (const int64_t setting : product_settings())
        key.push_back(setting);
    return key;
}

// For each thread, as its schedules: a lock might be taken where a process forks.
bool pays(const Products &products) {
    constexpr size_t kMostKeys = 1024;
    static thread_local std::map<Key, bool> known;
    const Key key = key_of(products);
    const auto found = known.find(key);
    if (found != known.end())
        return found->second;
    if (known.size() >= kMostKeys)
        return false;
    return known[key] = !OF_GUARD(batched_bits) || (has_bits(products) && is_faster(products));
}

bool is_same_number(const c10::Scalar &a, const c10::Scalar &b) {
    return a.type() == b.type() && a.toDouble() == b.toDouble();
}

// They begin with a cache line, as matrices of the trial do, and have one beta and one alpha.
bool are_usual(const Products &products) {
    return std::all_of(products.begin(), products.end(), [&](const Product &one) {
        return is_same_number(one.beta, products[0].beta) &&
               is_same_number(one.alpha, products[0].alpha) &&
               std::all_of(one.operands.begin(), one.operands.end(),
                           [](const at::Tensor &t) { return offset_in_line(t) == 0; });
    });
}

} // namespace

bool is_product(const Line &line, const std::vector<c10::IValue> &values) {
    const std::string &name = line.known->name;
    if (line.known->way != Way::MAKE || line.known->of_lists || (name != "mm" && name != "addmm"))
        return false;
    const size_t n = n_operands(line), last = line.first + n - 1;
    for (size_t i = line.first; i <= last; i++)
        if (!is_dense_matrix(values[i]))
            return false;
    const at::Tensor &a = values[last - 1].toTensor(), &b = values[last].toTensor();
    if (n == 3 && !equal(values[line.first].toTensor().sizes(), values[line.results].toTensor().sizes()))
        return false;
    return a.size(0) * a.size(1) * b.size(1) <= kMostWork;
}

bool are_alike(const Line &a, const Line &b, const std::vector<c10::IValue> &values) {
    const size_t n = n_operands(a);
    if (n_operands(b) != n)
        return false;
    for (size_t i = 0; i < n; i++) {
        const at::Tensor &x = values[a.first + i].toTensor(), &y = values[b.first + i].toTensor();
        if (x.dtype() != y.dtype() || !equal(x.sizes(), y.sizes()) ||
            !equal(x.strides(), y.strides()))
            return false;
    }
    return true;
}

size_t bytes_of_product(const Line &line, const std::vector<c10::IValue> &values) {
    size_t bytes = values[line.results].toTensor().nbytes();
    for (size_t i = 0; i < n_operands(line); i++)
        bytes += values[line.first + i].toTensor().nbytes();
    return bytes;
}

std::vector<at::Tensor> batched_product(const std::vector<uint32_t> &which,
                                        const std::vector<Line> &lines,
                                        const std::vector<c10::IValue> &values) {
    Products products;
    for (const uint32_t line : which)
        products.push_back(product_of(lines[line], values));
    const PlainMode plain;
    if (!are_usual(products) || !pays(products))
        return {};
    return in_one(products).unbind();
}

} // namespace optfuse::recorded
