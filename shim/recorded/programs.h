// SPDX-License-Identifier: BSD-3-Clause
// programs.h: programs over tensors' memory, and whether an instruction has its operator's bits.
#pragma once

#include <vector>

#include "optfuse.h"
#include "program.h"
#include "recorded/translate.h"

namespace optfuse::recorded {

// Side by side: none may use what another one writes.
void run_programs(const std::vector<of_part> &parts);

// Tried once for each operator, instruction and dtype, on numbers of all kinds. made: by
// translate().
bool has_bits(const Line &line, uint32_t place, const std::vector<c10::IValue> &values,
              const std::vector<Instruction> &made);

} // namespace optfuse::recorded
