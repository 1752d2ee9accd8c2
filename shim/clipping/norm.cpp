// SPDX-License-Identifier: BSD-3-Clause
// norm.cpp: 2-norms of gradients and whether they are finite, in one pass over
// their memory, with the factors that are pending on them and without applying
// these; and infinity-norms. PyTorch's operators do the work for gradients that can't be read here.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "absent/consumed.h"
#include "base/compat.h"
#include "base/parallel.h"
#include "base/threads.h"
#include "clipping/pending.h"
#include "clipping/spread.h"
#include "floating.h"
#include "guard.h"
#include "memory/memory.h"
#include "plan/refuse.h"

namespace optfuse {
namespace {

constexpr float kUnknown = std::numeric_limits<float>::quiet_NaN();

bool can_read(const at::Tensor &grad) {
    if (!grad.defined())
        return false;
    const c10::TensorImpl *g = grad.unsafeGetTensorImpl();
    return g->layout() == c10::kStrided && g->has_storage() && g->device().is_cpu() &&
           !g->key_set().has(c10::DispatchKey::Python) &&
           !g->key_set().has(c10::DispatchKey::Functionalize) && !grad._fw_grad(0).defined() &&
           !is_lazy(g) && !is_consumed(g) && g->is_contiguous() && g->numel() != 0;
}

bool can_square(const at::Tensor &grad) {
    return can_read(grad) && grad.scalar_type() == at::kFloat &&
           grad.numel() < (int64_t{1} << 31);
}

// The gradient with its pending factors. *known: the norm, if an earlier pass has found it; else
// NaN.
of_norm item_of(const at::Tensor &grad, float *known, unsigned *n_factors) {
    const c10::TensorImpl *g = grad.unsafeGetTensorImpl();
    of_norm item = {};
    compute_now(g);
    item.data = static_cast<const float *>(data_of(g));
    item.n = static_cast<size_t>(g->numel());
    *n_factors = of_scale_factors(storage_of(g), item.factors, known);
    return item;
}

} // namespace

// Each whole: its sum is in PyTorch's order.
void find_norms(std::vector<of_norm> &items, of_norm_fn *norm) {
    spread(items, norm);
}

std::optional<std::vector<float>> norms(const std::vector<const at::Tensor *> &of) {
    std::vector<float> values(of.size());
    std::vector<of_norm> items;
    std::vector<size_t> places;
    if (of.empty() || !std::all_of(of.begin(), of.end(), [](auto *t) { return can_square(*t); }))
        return std::nullopt;
    for (const at::Tensor *tensor : of)
        set_threads_as_operators(tensor->numel(), kSquaresSharedOut);
    if (!norms_are_torchs())
        return std::nullopt;
    items.reserve(of.size());
    places.reserve(of.size());
    for (size_t i = 0; i < of.size(); i++) {
        unsigned n_factors = 0;
        const of_norm item = item_of(*of[i], &values[i], &n_factors);
        if (std::isnan(values[i])) {
            items.push_back(item);
            places.push_back(i);
        }
    }
    find_norms(items, norm_in_order());
    for (size_t i = 0; i < items.size(); i++)
        values[places[i]] = items[i].norm;
    return values;
}

namespace {

bool are_read_alike(const std::vector<const at::Tensor *> &of, of_dtype *dtype) {
    const auto is_one = [&](const at::Tensor *t) {
        return can_read(*t) && t->dtype() == of[0]->dtype() &&
               dtype_of(t->unsafeGetTensorImpl(), dtype) &&
               !of_is_scaled(storage_of(t->unsafeGetTensorImpl()));
    };
    return !of.empty() && of_floating_now() == 0 && std::all_of(of.begin(), of.end(), is_one);
}

struct Piece {
    const char *numbers;
    size_t n;
};

// So large that another thread pays.
std::vector<Piece> pieces_of(const std::vector<const at::Tensor *> &of, size_t bytes) {
    constexpr size_t kMost = 32768;
    std::vector<Piece> pieces;
    for (const at::Tensor *tensor : of) {
        const c10::TensorImpl *g = tensor->unsafeGetTensorImpl();
        const size_t n = static_cast<size_t>(g->numel());
        compute_now(g);
        const auto *numbers = static_cast<const char *>(tensor->const_data_ptr());
        for (size_t at = 0; at < n; at += kMost)
            pieces.push_back({numbers + at * bytes, std::min(kMost, n - at)});
    }
    return pieces;
}

} // namespace

std::optional<at::Tensor> largest(const std::vector<const at::Tensor *> &of) {
    static of_largest_fn *const find = of_largest_find(of_isa_detect());
    of_dtype dtype;
    if (!are_read_alike(of, &dtype))
        return std::nullopt;
    for (const at::Tensor *tensor : of)
        set_threads_as_operators(tensor->numel(), kSharedOut);
    const size_t bytes = of[0]->dtype().itemsize();
    const std::vector<Piece> pieces = pieces_of(of, bytes);
    std::vector<char> found(pieces.size() * bytes);
    const auto work = [&](int64_t begin, int64_t end) {
        for (size_t i = static_cast<size_t>(begin); i < static_cast<size_t>(end); i++)
            find(&found[i * bytes], pieces[i].numbers, pieces[i].n, bytes);
    };
    const auto n = static_cast<int64_t>(pieces.size());
    constexpr int64_t kWorthAThread = 64; // mostly small ones
    if (of_is_forked())
        work(0, n);
    else
        in_parallel(n, kWorthAThread, work);
    at::Tensor norm = at::empty({}, of[0]->scalar_type());
    find(norm.mutable_data_ptr(), found.data(), pieces.size(), bytes);
    return norm;
}

std::optional<Unscaled> unscale(const std::vector<GradientOf> &of, const at::Tensor &factor) {
    const double number = factor.item<double>();
    std::vector<of_norm> items;
    if (!norms_are_torchs())
        return std::nullopt;
    for (const GradientOf &g : of) {
        float known = kUnknown;
        unsigned n_factors = 0;
        if (!can_square(g.grad()))
            return std::nullopt;
        items.push_back(item_of(g.grad(), &known, &n_factors));
        if (n_factors != 0)
            return std::nullopt;
        items.back().factors[0] = number;
    }
    find_norms(items, norm_in_order());
    Unscaled done = {true, false};
    for (size_t i = 0; i < of.size(); i++) {
        done.finite = (items[i].finite || !OF_GUARD(nonfinite)) && done.finite;
        done.some_wait |= scale_one(of[i], number, items[i].norm, factor);
    }
    return done;
}

} // namespace optfuse
