// SPDX-License-Identifier: BSD-3-Clause
#pragma once

namespace optfuse {

// Neither copied nor moved.
struct Pinned {
    Pinned() = default;
    Pinned(const Pinned &) = delete;
    Pinned &operator=(const Pinned &) = delete;
};

} // namespace optfuse
