// SPDX-License-Identifier: BSD-3-Clause
// mkl.h: Intel's math library inside of libtorch_cpu, which exports its Fortran entry points.
#pragma once

#include "base/pinned.h"

namespace optfuse {

// An entry point of the math library that PyTorch's operators on the CPU call; null: there is none
// of this name.
void *find_in_libtorch(const char *name);
template <typename Function> Function function_of_mkl(const char *name) {
    return reinterpret_cast<Function>(find_in_libtorch(name));
}

// As long as one exists MKL opens no parallel region of its own on this thread.
class SerialMkl : Pinned {
  public:
    SerialMkl();
    ~SerialMkl();
    static bool is_possible();    // whether there is MKL
    static int threads();         // that it would use here without one; 0: there is no MKL
    static void forget_threads(); // the number of this thread: the process's from here on

  private:
    const bool outermost;
    int before = 0; // what the user's own calls of MKL have on this thread
};

} // namespace optfuse
