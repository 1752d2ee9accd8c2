// SPDX-License-Identifier: BSD-3-Clause
// gil.h: Python's global lock, the GIL. An update that runs an optimizer's own step()
// takes the GIL while it holds the lock of its plan. So a thread that waits for the lock
// of a plan must not hold the GIL, with which PyTorch calls some operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "base/pinned.h"

namespace optfuse {

// From now on WithoutGil lets go of the GIL: there are plans whose updates run Python.
void updates_take_the_gil();

// As long as one exists, its thread does not hold the GIL.
class WithoutGil : Pinned {
  public:
    WithoutGil();
    ~WithoutGil();

  private:
    void *thread; // its PyThreadState, or NULL
};

// Drops these references, and takes the GIL once for all of them. A reference that leaves a tensor
// to Python alone needs the GIL, and an operator that Python has called does without.
void let_go(std::vector<at::Tensor> tensors);

} // namespace optfuse
