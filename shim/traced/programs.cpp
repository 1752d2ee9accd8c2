// SPDX-License-Identifier: BSD-3-Clause
#include "traced/programs.h"

#include <string>
#include <utility>

#include "error.h"

namespace optfuse {
namespace {

constexpr size_t kWords = 5, kNumbers = 2; // of an instruction

// A number too large for a byte is no register and no operator.
unsigned char byte_of(int64_t word) {
    return word < 0 || word > UINT8_MAX ? UINT8_MAX : static_cast<unsigned char>(word);
}

} // namespace

std::shared_ptr<const Program> make_program(const std::vector<int64_t> &code,
                                            const std::vector<double> &numbers) {
    const size_t n = code.size() / kWords;
    if (code.size() != n * kWords || numbers.size() != n * kNumbers)
        fail("optfuse: a program has five words and two numbers for each instruction");
    const auto program = std::make_shared<Program>();
    for (size_t i = 0; i < n; i++) {
        const int64_t *words = &code[i * kWords];
        const double *pair = &numbers[i * kNumbers];
        program->code.push_back({byte_of(words[0]), byte_of(words[1]), byte_of(words[2]),
                                 byte_of(words[3]), byte_of(words[4]), pair[0], pair[1]});
    }
    program->core.code = program->code.data();
    program->core.n = n;
    if (const char *wrong = of_program_check(&program->core))
        fail(std::string("optfuse: a program can't be run: ") + wrong);
    program->core.n = of_program_fuse(program->code.data(), n);
    return program;
}

std::shared_ptr<const Program> make_program(std::vector<Part> parts, Forms forms,
                                            size_t n_registers, unsigned touches, unsigned writes) {
    const auto program = std::make_shared<Program>();
    program->parts = std::move(parts);
    program->forms = std::move(forms);
    program->n_registers = n_registers;
    program->core.reads = touches;
    program->core.writes = writes;
    program->core.by_host = true;
    return program;
}

} // namespace optfuse
