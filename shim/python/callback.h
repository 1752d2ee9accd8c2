// SPDX-License-Identifier: BSD-3-Clause
// callback.h: what the library asks of Python.
#pragma once

#include <cstddef>

#include "error.h"
#include "shim.h"

namespace optfuse {

struct Plan;

void set_callback(_object *callable);
// Whether it was done, or what a pass is, as shim.h says; 0 if it failed: why is in
// of_error_message(), and in raised_in_python if it is to arrive as another type than
// optfuse.Error.
int ask_python(Plan *plan, of_shim_event event, size_t slot);
extern thread_local _object *raised_in_python;
// Whether Python makes an update of this plan on this thread now, under the plan's lock: who
// waits for that lock here, as a signal handler might, waits for ever.
bool is_updating_here(const Plan *plan);

} // namespace optfuse
