// SPDX-License-Identifier: BSD-3-Clause
// error.hpp: what optfuse refuses to do, as C++ programs catch it.
#pragma once

#include <stdexcept>

namespace optfuse {

// From fuse(), from the wrapper's functions, from backward(), and from operators that are given a
// parameter or gradient. what() says what happened, to which parameter, and what to do. In a
// process where Python has fused optimizers, too, backward() and operators raise Python's
// optfuse.Error, which C++ sees as a std::exception.
class __attribute__((visibility("default"))) Error : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

} // namespace optfuse
