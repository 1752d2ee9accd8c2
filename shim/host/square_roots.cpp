// SPDX-License-Identifier: BSD-3-Clause
// square_roots.cpp: square roots as torch.sqrt() takes them on contiguous float32 and
// float64. It calls Intel's vector math library, which does not round every
// root correctly and whose code depends on the processor, so that only the
// library itself has its bits. libtorch_cpu carries it and exports its Fortran
// entry points; where there are none, or where they turn out not to be what
// torch.sqrt() calls, the operator itself is called, which costs more.
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/sqrt.h>

#include "base/mkl.h"
#include "base/plain_mode.h"
#include "base/threads.h"
#include "host/host.h"

namespace optfuse {
namespace {

// Constants of mkl_vml_defines.h: high accuracy, denormals kept, no error reports.
constexpr long long kMode = 0x2 | 0x140000 | 0x100;

using RootsOfMkl = void (*)(const long long *n, const void *in, void *out, const long long *mode);

void by_operator(void *values, size_t n, c10::ScalarType dtype) {
    const PlainMode plain;
    at::Tensor tensor = at::from_blob(values, {static_cast<int64_t>(n)}, dtype);
    at::sqrt_out(tensor, tensor);
}

void by_mkl(RootsOfMkl roots, void *values, size_t n) {
    const SerialMkl alone;
    const auto count = static_cast<long long>(n);
    roots(&count, values, values, &kMode);
}

// Numbers of all magnitudes, many of which are not rounded correctly: evenly spaced bits.
// Nothing is computed, since a thread may take denormals for zeros.
template <typename Real, typename Bits> std::vector<Real> samples() {
    constexpr Bits kCount = 5000;
    const Real infinity = std::numeric_limits<Real>::infinity();
    Bits all = 0;
    std::memcpy(&all, &infinity, sizeof all);
    std::vector<Real> numbers(kCount);
    for (Bits i = 0; i < kCount; i++) {
        const Bits bits = all / kCount * i + i;
        std::memcpy(&numbers[i], &bits, sizeof bits);
    }
    return numbers;
}

template <typename Real, typename Bits> RootsOfMkl find(const char *name, c10::ScalarType dtype) {
    const auto found = function_of_mkl<RootsOfMkl>(name);
    if (found == nullptr)
        return nullptr;
    std::vector<Real> mine = samples<Real, Bits>();
    std::vector<Real> theirs = mine;
    by_mkl(found, mine.data(), mine.size());
    on_another_thread([&] { by_operator(theirs.data(), theirs.size(), dtype); });
    const size_t bytes = mine.size() * sizeof(Real);
    return std::memcmp(mine.data(), theirs.data(), bytes) == 0 ? found : nullptr;
}

} // namespace

void square_roots_of_floats(void *values, size_t n) {
    static const RootsOfMkl mkl = find<float, uint32_t>("VMSSQRT_64_", c10::kFloat);
    if (mkl != nullptr)
        by_mkl(mkl, values, n);
    else
        by_operator(values, n, c10::kFloat);
}

void square_roots_of_doubles(void *values, size_t n) {
    static const RootsOfMkl mkl = find<double, uint64_t>("VMDSQRT_64_", c10::kDouble);
    if (mkl != nullptr)
        by_mkl(mkl, values, n);
    else
        by_operator(values, n, c10::kDouble);
}

} // namespace optfuse
