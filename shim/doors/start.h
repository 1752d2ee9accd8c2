// SPDX-License-Identifier: BSD-3-Clause
// start.h: what the library does once in a process.
#pragma once

namespace optfuse {

// Registers the first-use fallback and the fork handlers, at the first call. An of_status:
// OF_REFUSED if another library owns the dispatch key.
int start();

} // namespace optfuse
