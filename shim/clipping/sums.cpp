// SPDX-License-Identifier: BSD-3-Clause
// sums.cpp: norms by sums in the order of PyTorch's operator: 1-norms, and 2-norms of other dtypes
// than float32, whose pass (norm.cpp) multiplies by pending factors on the way.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/TypeCast.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "clipping/pending.h"
#include "clipping/spread.h"
#include "tensor/memory.h"

namespace optfuse {
namespace {

// Where PyTorch adds one number after the other, each of its threads adds a part of as many.
int64_t elements_a_part(int64_t n, of_dtype dtype, of_terms terms) {
    constexpr int64_t kGrain = 32768;
    if (terms == OF_SQUARES && dtype != OF_FLOAT16)
        return n; // in lanes
    const int64_t threads = std::min<int64_t>(thread_count(), (n + kGrain - 1) / kGrain);
    return (n + threads - 1) / threads;
}

double rounded_to(double number, of_dtype dtype) {
    const float single = static_cast<float>(number);
    switch (dtype) {
    case OF_FLOAT64:
        return number;
    case OF_BFLOAT16:
        return static_cast<double>(static_cast<float>(c10::BFloat16(single)));
    case OF_FLOAT16:
        return static_cast<double>(static_cast<float>(c10::convert<c10::Half>(single)));
    default:
        return static_cast<double>(single);
    }
}

// The root of a float, computed in double and rounded to float, is the float root: double has more than
// twice the bits of float.
double norm_of_sum(double sum, of_dtype dtype, of_terms terms) {
    const double norm = terms == OF_SQUARES ? std::sqrt(sum) : sum;
    return rounded_to(dtype == OF_FLOAT64 ? norm : static_cast<double>(static_cast<float>(norm)),
                   dtype);
}

// The sums of an array's parts, one after the other; likewise.
double add_parts(const of_sum *parts, size_t n, of_dtype dtype) {
    double sum = parts[0].sum;
    for (size_t i = 1; i < n; i++) {
        sum += parts[i].sum;
        sum = dtype == OF_FLOAT64 ? sum : static_cast<double>(static_cast<float>(sum));
    }
    return sum;
}

// The norm of a single number.
double magnitude(const void *number, of_sum_fn *sum) {
    of_sum one = {number, 1, 0}, *const only = &one;
    sum(&only, 1, OF_MAGNITUDES, 0);
    return one.sum;
}

} // namespace

std::vector<double> norms_of_arrays(const std::vector<Array> &of, of_dtype dtype, of_terms terms,
                                    size_t rounded_by) {
    of_sum_fn *const sum = of_sum_find(dtype, of_isa_detect());
    const size_t bytes = of_dtype_size(dtype);
    std::vector<of_sum> parts;
    std::vector<size_t> ends;
    parts.reserve(of.size());
    ends.reserve(of.size());
    for (const Array &array : of) {
        const int64_t part = elements_a_part(array.n, dtype, terms);
        for (int64_t at = 0; at < array.n; at += part)
            parts.push_back({static_cast<const char *>(array.at) + static_cast<size_t>(at) * bytes,
                             static_cast<size_t>(std::min(part, array.n - at)), 0});
        ends.push_back(parts.size());
    }
    spread(parts, [&](of_sum *const *some, size_t n) { sum(some, n, terms, rounded_by); });
    std::vector<double> norms;
    norms.reserve(of.size());
    for (size_t i = 0, begin = 0; i < of.size(); begin = ends[i++])
        norms.push_back(
            of[i].n == 1
                ? magnitude(of[i].at, sum)
                : norm_of_sum(add_parts(&parts[begin], ends[i] - begin, dtype), dtype, terms));
    return norms;
}

void put_number(const at::Tensor &into, size_t i, double number) {
    void *const at = into.mutable_data_ptr();
    switch (into.scalar_type()) {
    case at::kDouble:
        static_cast<double *>(at)[i] = number;
        break;
    case at::kBFloat16:
        static_cast<c10::BFloat16 *>(at)[i] = static_cast<float>(number);
        break;
    case at::kHalf:
        static_cast<c10::Half *>(at)[i] = c10::convert<c10::Half>(static_cast<float>(number));
        break;
    default:
        static_cast<float *>(at)[i] = static_cast<float>(number);
    }
}

std::optional<std::vector<double>> norms_by_sums(const std::vector<const at::Tensor *> &of,
                                                 of_terms terms) {
    of_dtype dtype;
    if (!are_read_alike(of, &dtype) || (dtype == OF_FLOAT32 && terms == OF_SQUARES))
        return std::nullopt;
    set_threads_as_norms(of, terms);
    const std::optional<size_t> rounded_by = rounded_in_order(dtype, terms);
    if (!rounded_by)
        return std::nullopt;
    std::vector<Array> arrays;
    arrays.reserve(of.size());
    for (const at::Tensor *tensor : of) {
        const c10::TensorImpl *g = tensor->unsafeGetTensorImpl();
        compute_now(g);
        arrays.push_back({tensor->const_data_ptr(), g->numel()});
    }
    return norms_of_arrays(arrays, dtype, terms, *rounded_by);
}

} // namespace optfuse
