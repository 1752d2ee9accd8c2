// SPDX-License-Identifier: BSD-3-Clause
// record.h: the operators that a step() calls while it is recorded.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "recorded/tape.h"

namespace optfuse::recorded {

using PassOn = void (*)(const c10::OperatorHandle &op, c10::DispatchKeySet keys,
                        torch::jit::Stack *stack);

// Writes the operator on the tape, or runs it, by pass_on, behind the lines that it needs.
void record(Tape *tape, const c10::OperatorHandle &op, c10::DispatchKeySet keys,
            torch::jit::Stack *stack, PassOn pass_on);

} // namespace optfuse::recorded
