// SPDX-License-Identifier: BSD-3-Clause
// products.h: products of small matrices of one form, of which none needs another, as one batched
// product: Newton-Schulz iterations of many parameters take a fifth of the time then.
#pragma once

#include <cstdint>
#include <vector>

#include "recorded/tape.h"

namespace optfuse::recorded {

// mm() or addmm() of small dense matrices of floating point on the CPU.
bool is_product(const Line &line, const std::vector<c10::IValue> &values);

// Two products with operands of the same forms.
bool are_alike(const Line &a, const Line &b, const std::vector<c10::IValue> &values);

// The bytes of a product's operands and its result.
size_t bytes_of_product(const Line &line, const std::vector<c10::IValue> &values);

// The results of these lines, which are alike, as parts of one tensor. Nothing where a trial of their
// forms and their number has shown that it has other bits than the operator, or takes as long.
std::vector<at::Tensor> batched_product(const std::vector<uint32_t> &which,
                                        const std::vector<Line> &lines,
                                        const std::vector<c10::IValue> &values);

} // namespace optfuse::recorded
