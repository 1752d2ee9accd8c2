// SPDX-License-Identifier: BSD-3-Clause
// newton_schulz.cpp: the iterations, and for which matrices cuBLAS makes their products:
// one table for the process. What is not in it is left to the operators.
#include "matrix/newton_schulz.h"

#include <ATen/ops/isfinite.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <map>
#include <mutex>
#include <optional>
#include <tuple>

#include "gpu/device.h"
#include "guard.h"
#include "matrix/product_trial.h"

namespace optfuse {
namespace {

// The facts that decide how PyTorch and cuBLAS multiply, as long as the settings are the usual
// ones: the GPU, rows, columns and layout of the first x, and the numbers.
using MatrixKind = std::tuple<int, int64_t, int64_t, bool, double, double, double>;

MatrixKind kind_of(const at::Tensor &x, const Polynomial &p) {
    return {x.device().index(), x.size(0), x.size(1), x.is_contiguous(), p.a, p.b, p.c};
}

std::mutex table_lock; // nothing else is done under it

std::map<MatrixKind, std::string> &verdicts() { // why not by cuBLAS; empty: by it
    static auto *only = new std::map<MatrixKind, std::string>; // until the process ends
    return *only;
}

void remember(const MatrixKind &kind, const std::string &why) {
    const std::lock_guard<std::mutex> guard(table_lock);
    verdicts()[kind] = why;
}

std::optional<std::string> verdict(const MatrixKind &kind) {
    const std::lock_guard<std::mutex> guard(table_lock);
    const auto found = verdicts().find(kind);
    return found == verdicts().end() ? std::nullopt : std::optional(found->second);
}

std::string why_not(const MatrixKind &kind) {
    const std::optional<std::string> why = verdict(kind);
    if (why && !why->empty())
        return *why;
    const std::string settings = other_settings();
    return settings.empty() && !why ? "there was no trial" : settings;
}

bool is_promised(const MatrixKind &kind) {
    const std::optional<std::string> why = verdict(kind);
    return why && why->empty() && other_settings().empty();
}

// A row or a column does not fit: its strides say nothing.
bool fits_cublas(const at::Tensor &x) {
    return is_gpu(x.device()) && x.scalar_type() == at::kBFloat16 && x.layout() == at::kStrided &&
           x.dim() == 2 && x.size(0) > 1 && x.size(1) > 1 && x.is_non_overlapping_and_dense();
}

template <class Multiply>
at::Tensor next(const at::Tensor &x, const Polynomial &p, Multiply &&product) {
    const at::Tensor transpose = x.t();
    const at::Tensor gram = product({x, transpose});
    const at::Tensor sum = product({gram, gram, p.c, &gram, p.b});
    return product({sum, x, 1, &x, p.a});
}

// The first iteration may find another layout than the second; that one's is every
// later one's.
std::string compared(at::Tensor x, const Polynomial &p) {
    std::string why;
    const auto product = [&why](const Product &wanted) {
        if (why.empty())
            why = difference(wanted);
        return by_operators(wanted);
    };
    for (int i = 0; i < 2; i++)
        x = next(x, p, product);
    if (why.empty() && !at::isfinite(x).all().item<bool>())
        why = "the trial of cuBLAS showed nothing: its numbers overflowed";
    return why;
}

std::string compared_safely(const at::Tensor &x, const Polynomial &p) {
    const c10::DeviceGuard device(x.device());
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    try {
        return compared(x, p);
    } catch (const c10::Error &error) { // the operators need none of this
        return std::string("the trial of cuBLAS failed: ") + error.what_without_backtrace();
    } catch (const std::exception &error) {
        return std::string("the trial of cuBLAS failed: ") + error.what();
    }
}

} // namespace

at::Tensor iterated(at::Tensor x, const Polynomial &p, double times) {
    const MatrixKind kind = kind_of(x, p);
    bool direct = fits_cublas(x) && (!OF_GUARD(products) || is_promised(kind));
    const auto product = [&](const Product &wanted) {
        if (direct) {
            at::Tensor out = by_cublas(wanted);
            if (out.defined())
                return out;
            direct = false;
            remember(kind, taken_error());
        }
        return by_operators(wanted);
    };
    for (double i = 0; i < times; i++)
        x = next(x, p, product);
    return x;
}

std::string try_products(const at::Tensor &x, const Polynomial &p) {
    // With other settings there is none, and so no verdict.
    if (fits_cublas(x) && !verdict(kind_of(x, p)) && other_settings().empty())
        remember(kind_of(x, p), compared_safely(x, p));
    return why_operators(x.device(), x.size(0), x.size(1), x.is_contiguous(), p);
}

std::string why_operators(c10::Device device, int64_t rows, int64_t columns, bool by_rows,
                          const Polynomial &p) {
    if (rows < 2 || columns < 2)
        return "a single row or column is left to them";
    return why_not({device.index(), rows, columns, by_rows, p.a, p.b, p.c});
}

} // namespace optfuse
