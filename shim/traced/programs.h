// SPDX-License-Identifier: BSD-3-Clause
// programs.h: the programs (kernels/program.h) of an optimizer whose step() is traced.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "program.h"

namespace optfuse {

// Never changed: pending updates share it with the slots that it was given to.
struct Program {
    std::vector<of_instruction> code;
    of_program core = {}; // over `code`

    bool writes_gradient() const { return (core.writes >> OF_REGISTER_GRAD & 1u) != 0; }
    unsigned state() const { return (core.reads | core.writes) >> OF_REGISTER_STATE; } // a bit each
};

// code: five numbers for each instruction (operator, to, a, b, c); numbers: two (s, t). Raises
// Error if it can't be run.
std::shared_ptr<const Program> make_program(const std::vector<int64_t> &code,
                                            const std::vector<double> &numbers);

} // namespace optfuse
