// SPDX-License-Identifier: BSD-3-Clause
#include "memory/trial_matrices.h"

#include <ATen/Context.h>
#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <limits>
#include <type_traits>

#include "base/mkl.h"
#include "base/parallel.h"
#include "floating.h"
#include "memory/memory.h"

namespace optfuse {
namespace {

template <typename Real> Real special(Draws &draws) {
    using Limits = std::numeric_limits<Real>;
    const Real of[] = {0,
                       Real(-0.0),
                       Limits::denorm_min(),
                       -Limits::min() / 4,
                       Limits::infinity(),
                       -Limits::infinity(),
                       Limits::quiet_NaN(),
                       Limits::max(),
                       1};
    return of[static_cast<size_t>((draws.next() + 1) / 2 * 8.999)];
}

template <typename Real> Real rounded(double number) {
    if constexpr (sizeof(Real) == 2)
        return c10::convert<Real>(static_cast<float>(number));
    else
        return static_cast<Real>(number);
}

template <typename Real> Real number(TrialNumbers kind, int64_t row, Draws &draws) {
    const double random = draws.next();
    const double most = std::is_same_v<Real, at::Half> ? 8 : 1e3; // products are finite
    switch (kind) {
    case TrialNumbers::SPREAD:
        return rounded<Real>(random * random * random * most);
    case TrialNumbers::CANCELLING:
        return rounded<Real>((row % 2 == 0 ? 1 : -1) + random * 1e-3);
    case TrialNumbers::TINY:
        return rounded<Real>(random * 4 *
                             std::sqrt(static_cast<double>(std::numeric_limits<Real>::min())));
    case TrialNumbers::SPECIAL:
        return draws.next() > 0.5 ? special<Real>(draws) : rounded<Real>(random);
    case TrialNumbers::MIXED:
        break; // of those above, by column
    }
    return Real(0);
}

// Zeros, half of them negative, as behind a ReLU: CANCELLING has some in each column.
template <typename Real> void fill(const at::Tensor &t, TrialNumbers numbers, Draws &draws) {
    auto *at = static_cast<Real *>(data_of(t.unsafeGetTensorImpl()));
    for (int64_t i = 0; i < t.size(0); i++)
        for (int64_t j = 0; j < t.size(1); j++) {
            const TrialNumbers kind = numbers == TrialNumbers::MIXED
                                          ? kTrialNumbers[static_cast<size_t>(j % 4)]
                                          : numbers;
            const Real value = number<Real>(kind, i, draws);
            const bool is_zero = kind == TrialNumbers::CANCELLING && (i * 7 + j) % 5 < 2;
            at[i * t.stride(0) + j * t.stride(1)] = is_zero ? value * Real(0) : value;
        }
}

} // namespace

int64_t offset_in_line(const at::Tensor &t) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(data_of(t.unsafeGetTensorImpl())) %
                                OF_CACHE_LINE);
}

at::Tensor trial_matrix(const at::Tensor &like, TrialNumbers numbers, Draws &draws) {
    const auto offset = offset_in_line(like) / static_cast<int64_t>(like.element_size());
    int64_t extent = 1;
    for (int64_t d = 0; d < like.dim(); d++)
        extent += (like.size(d) - 1) * like.stride(d);
    const at::Tensor flat = at::empty({extent + offset}, like.options());
    at::Tensor made = flat.as_strided(like.sizes(), like.strides(), offset);
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, like.scalar_type(), "trial_matrix",
                                    [&] { fill<scalar_t>(made, numbers, draws); });
    return made;
}

ProductSettings product_settings() {
    const at::Context &torch = at::globalContext();
    using at::Float32Backend;
    using at::Float32Op;
    const auto precision = [&torch](Float32Backend backend, Float32Op op) {
        return static_cast<int64_t>(torch.float32Precision(backend, op));
    };
    return {thread_count(),
            SerialMkl::threads(),
            at::in_parallel_region(),
            of_floating_now(),
            precision(Float32Backend::MKLDNN, Float32Op::MATMUL),
            precision(Float32Backend::GENERIC, Float32Op::ALL),
            torch.userEnabledMkldnn(),
            torch.deterministicAlgorithms(),
            torch.deterministicMkldnn()};
}

} // namespace optfuse
