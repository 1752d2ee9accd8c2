// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>

namespace optfuse {

// Seconds since a moment that is the same for the process.
inline double seconds_now() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(since).count();
}

} // namespace optfuse
