// SPDX-License-Identifier: BSD-3-Clause
// product_trial.h: does cuBLAS multiply as PyTorch's operators do?
#pragma once

#include <string>

#include "matrix/products.h"

namespace optfuse {

// The difference between cuBLAS's result and the operators', for this product and for one of other
// matrices that are multiplied alike. Empty: there is none. Waits for the device.
std::string difference(const Product &wanted);

} // namespace optfuse
