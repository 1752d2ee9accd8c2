// SPDX-License-Identifier: BSD-3-Clause
// callback.h: what the library asks of Python.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "base/error.h"

namespace optfuse {

struct Plan;

// Thrown where Python has raised: what it raised is the interpreter's error of this thread.
struct RaisedInPython {};

// Runs work() with the GIL, and handlers of signals before or after it. updates: the plan, if this is
// an update of it, under its lock. False: it raised; of_error_message() says why, and raised_in_python
// is the type to raise if that is not optfuse.Error, with text_of_raised: of what an update raises its
// own type, if that takes a text, and always that of an interrupt. is_users: so does other code of the
// user's.
bool in_python(const std::function<void()> &work, const Plan *updates = nullptr,
               bool is_users = false);
extern thread_local _object *raised_in_python;
extern thread_local std::string text_of_raised;
// Where a script is: what of PyTorch it has called, "clipping" or "unscaling" or nothing, and file
// and line, "train.py:12: ", or nothing if no frame of Python's is there. Only for an error.
struct Caller {
    std::string act, place;
};
Caller find_caller();
// Whether Python makes an update of this plan on this thread now, under the plan's lock: who
// waits for that lock here, as a signal handler might, waits for ever.
bool is_updating_here(const Plan *plan);

} // namespace optfuse
