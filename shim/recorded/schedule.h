// SPDX-License-Identifier: BSD-3-Clause
// schedule.h: how lines run: elementwise ones on the same tensors as a program of ours (kernels/program.h),
// others as PyTorch's operators, in an order in which nothing is read too early or too late. A
// schedule is made once for the same lines, by which numbers they may differ.
#pragma once

#include <vector>

#include "recorded/tape.h"

namespace optfuse::recorded {

// Runs them all. Of the values tensors become garbage of the tape. After an exception what a line that
// has not run would have made stays without memory, and sealed.
void run_lines(const std::vector<Line> &lines, std::vector<c10::IValue> &values, Tape *tape);

} // namespace optfuse::recorded
