// SPDX-License-Identifier: BSD-3-Clause
// programs.h: the programs (kernels/program.h) of a parameter or of its average.
#pragma once

#include <memory>
#include <vector>

#include "program.h"

namespace optfuse {

// Never changed: pending updates share it with the slots that it was given to.
struct Program {
    std::vector<of_instruction> code;
    of_program core = {};     // over `code`
    bool is_own = false;      // of those by the host: the class's own step() runs, not lines (ahead.h)

    bool writes_gradient() const { return (core.writes >> OF_REGISTER_GRAD & 1u) != 0; }
    unsigned state() const { return (core.reads | core.writes) >> OF_REGISTER_STATE; } // a bit each
};

// Null: it can't be run.
std::shared_ptr<const Program> make_program(std::vector<of_instruction> code);

} // namespace optfuse
