// SPDX-License-Identifier: BSD-3-Clause
// nested_passes.h: backward passes that run inside of others, as a checkpoint starts them that is
// reentrant. The loader says where one begins (shim.h).
#pragma once

#include <cstdint>
#include <functional>

namespace optfuse {

// That of the pass in which all others of this thread run; -1: there is none.
int64_t outermost_graph_task();
// Behind it, or the pass that runs here, unless that fails.
void run_behind_this_pass(std::function<void()> work);
void run_behind_outermost(std::function<void()> work);

} // namespace optfuse
