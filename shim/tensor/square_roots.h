// SPDX-License-Identifier: BSD-3-Clause
// square_roots.h: square roots with the bits of PyTorch's operator.
#pragma once

#include <cstddef>

namespace optfuse {

// n values of float32; of float64.
void square_roots_of_floats(void *values, size_t n);
void square_roots_of_doubles(void *values, size_t n);
// As long as one exists MKL opens no parallel region of its own on this thread.
class SerialMkl {
  public:
    SerialMkl();
    ~SerialMkl();
    SerialMkl(const SerialMkl &) = delete;
    SerialMkl &operator=(const SerialMkl &) = delete;

  private:
    const bool outermost;
    int before = 0; // what the user's own calls of MKL have on this thread
};

} // namespace optfuse
