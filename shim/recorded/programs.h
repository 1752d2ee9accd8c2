// SPDX-License-Identifier: BSD-3-Clause
// programs.h: programs over tensors' memory, and whether an instruction has its operator's bits.
#pragma once

#include <vector>

#include "cuda/cuda_kernels.h"
#include "optfuse.h"
#include "program.h"
#include "recorded/translate.h"

namespace optfuse::recorded {

// On the CPU, side by side: none may use what another one writes.
void run_programs(const std::vector<of_part> &parts);

// The memory of one on a GPU.
of_gpu_entry entry_of(const of_part &part);

// Tried once for each operator, instruction, dtype and device, on numbers of all kinds. On a GPU
// that takes a wait of the host. made: by translate().
bool has_bits(const Line &line, uint32_t place, const std::vector<c10::IValue> &values,
              const std::vector<Instruction> &made);

} // namespace optfuse::recorded
