// SPDX-License-Identifier: BSD-3-Clause
// replay.h: a step() on stand-ins (_traced/guide.py) mostly calls the operators of the step before,
// with other numbers. Then the operators need not be asked of Python.
#ifndef OPTFUSE_SHIM_TRACED_REPLAY_H
#define OPTFUSE_SHIM_TRACED_REPLAY_H

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace optfuse {

using PassOn = void (*)(const c10::OperatorHandle &op, c10::DispatchKeySet keys,
                        torch::jit::Stack *stack);

// Whether a replay on this thread has answered the operator, or has noted it and passed it on.
// Raises an error where the replay has another operator or other arguments.
bool replay_answers(const c10::OperatorHandle &op, c10::DispatchKeySet keys,
                    torch::jit::Stack *stack, PassOn pass_on);

} // namespace optfuse

#endif
