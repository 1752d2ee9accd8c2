// SPDX-License-Identifier: BSD-3-Clause
#include "plan/programs.h"

#include <utility>

namespace optfuse {

std::shared_ptr<const Program> make_program(std::vector<of_instruction> code) {
    of_program core = {code.data(), code.size(), 0, 0, false};
    if (of_program_check(&core) != nullptr)
        return nullptr;
    const auto program = std::make_shared<Program>();
    code.resize(of_program_fuse(code.data(), code.size()));
    program->code = std::move(code);
    program->core = {program->code.data(), program->code.size(), core.reads, core.writes, false};
    return program;
}

} // namespace optfuse
