// SPDX-License-Identifier: BSD-3-Clause
// programs.h: programs over tensors' memory, and whether an instruction has its operator's bits.
#pragma once

#include <array>
#include <vector>

#include "cuda/cuda_kernels.h"
#include "optfuse.h"
#include "program.h"
#include "recorded/translate.h"

namespace optfuse::recorded {

using Memory = std::array<void *, OF_REGISTER_TEMPORARY>;

// memory: what its first registers are. On the CPU.
void run_program(const of_program *program, const Memory &memory, int64_t numel, of_dtype dtype);

// The same of a program on a GPU.
of_cuda_entry entry_of(const Memory &memory, int64_t numel);

// Tried once for each operator, instruction, dtype and device, on numbers of all kinds. On a GPU
// that takes a wait of the host. made: by translate().
bool has_bits(const Line &line, uint32_t place, const std::vector<c10::IValue> &values,
              const std::vector<Instruction> &made);

} // namespace optfuse::recorded
