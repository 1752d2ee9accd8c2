// SPDX-License-Identifier: BSD-3-Clause
// schedule.h: how lines run: elementwise ones on the same tensors as a program of ours (kernels/program.h),
// others as PyTorch's operators, in an order in which nothing is read too early or too late. A
// schedule is made once for the same lines, by which numbers they may differ.
#pragma once

#include <memory>
#include <vector>

#include "recorded/tape.h"

namespace optfuse {
struct Program;
}

namespace optfuse::recorded {

// The lines as one program over a parameter, its gradient and other tensors of their form, which are
// put into *state in the order of its registers. Null: they are more than that, or come for the first
// time. known: those of other parameters, of which one of the last few is returned if it is the same;
// else it gets one more.
std::shared_ptr<const Program> program_of(const std::vector<Line> &lines,
                                          const std::vector<c10::IValue> &values,
                                          const c10::TensorImpl *param,
                                          const c10::TensorImpl *gradient,
                                          std::vector<std::shared_ptr<const Program>> *known,
                                          std::vector<at::Tensor> *state);

// Runs them all. Of the values tensors become garbage of the tape. After an exception what a line that
// has not run would have made stays without memory, and sealed.
void run_lines(const std::vector<Line> &lines, std::vector<c10::IValue> &values, Tape *tape);

} // namespace optfuse::recorded
