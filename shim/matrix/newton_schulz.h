// SPDX-License-Identifier: BSD-3-Clause
// newton_schulz.h: Muon's iterations. PyTorch's operators multiply, or, on a GPU and
// where a trial has shown their bits there, cuBLAS.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace optfuse {

// The next x is a x + (b g + c g g) x, of g = x x^T.
struct Polynomial {
    double a, b, c;
};

// The update's direction, in bfloat16 and lying: with at least as many columns as rows.
at::Tensor iterated(at::Tensor x, const Polynomial &p, double times);

// Tries whether cuBLAS multiplies a matrix like x, on its GPU, as the operators do. If so,
// iterated() uses cuBLAS from then on for such matrices and these numbers. Each kind is tried
// once in a process. Waits for the device. Returns what why_operators() does.
std::string try_products(const at::Tensor &x, const Polynomial &p);

// Why the operators multiply such matrices; empty if cuBLAS does. by_rows: it is contiguous.
std::string why_operators(c10::Device device, int64_t rows, int64_t columns, bool by_rows,
                          const Polynomial &p);

} // namespace optfuse
