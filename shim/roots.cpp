// SPDX-License-Identifier: BSD-3-Clause
// roots.cpp: square roots as torch.sqrt() takes them on contiguous float32 and
// float64. It calls Intel's vector math library, which does not round every
// root correctly and whose code depends on the processor, so that only the
// library itself has its bits. libtorch_cpu carries it and exports its Fortran
// entry points; where there are none, or where they turn out not to be what
// torch.sqrt() calls, the operator itself is called, which costs more.
#include <dlfcn.h>

#include <cstring>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/sqrt.h>

#include "tensors.h"

namespace optfuse {
namespace {

// Of mkl_vml_defines.h: high accuracy, denormals kept, no error reports.
constexpr long long kMode = 0x2 | 0x140000 | 0x100;

using RootsOfMkl = void (*)(const long long *n, const void *in, void *out, const long long *mode);

void by_operator(void *values, size_t n, c10::ScalarType dtype) {
    const PlainMode plain;
    at::Tensor tensor = at::from_blob(values, {static_cast<int64_t>(n)}, dtype);
    at::sqrt_out(tensor, tensor);
}

void by_mkl(RootsOfMkl roots, void *values, size_t n) {
    const auto count = static_cast<long long>(n);
    roots(&count, values, values, &kMode);
}

// Numbers of all magnitudes, many of which are not rounded correctly.
template <typename Real> std::vector<Real> samples() {
    std::vector<Real> numbers;
    Real number = static_cast<Real>(1e-42);
    for (; number < static_cast<Real>(1e38); number *= static_cast<Real>(1.0371))
        numbers.push_back(number);
    return numbers;
}

template <typename Real> RootsOfMkl find(const char *name, c10::ScalarType dtype) {
    void *library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    const auto found =
        library != nullptr ? reinterpret_cast<RootsOfMkl>(dlsym(library, name)) : nullptr;
    if (found == nullptr)
        return nullptr;
    std::vector<Real> mine = samples<Real>();
    std::vector<Real> theirs = mine;
    by_mkl(found, mine.data(), mine.size());
    by_operator(theirs.data(), theirs.size(), dtype);
    return std::memcmp(mine.data(), theirs.data(), mine.size() * sizeof(Real)) == 0 ? found : nullptr;
}

} // namespace

void square_roots_of_floats(void *values, size_t n) {
    static const RootsOfMkl mkl = find<float>("VMSSQRT_64_", c10::kFloat);
    if (mkl != nullptr)
        by_mkl(mkl, values, n);
    else
        by_operator(values, n, c10::kFloat);
}

void square_roots_of_doubles(void *values, size_t n) {
    static const RootsOfMkl mkl = find<double>("VMDSQRT_64_", c10::kDouble);
    if (mkl != nullptr)
        by_mkl(mkl, values, n);
    else
        by_operator(values, n, c10::kDouble);
}

} // namespace optfuse
