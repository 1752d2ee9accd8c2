// SPDX-License-Identifier: BSD-3-Clause
#include "recorded/programs.h"

#include <ATen/ATen.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "base/error.h"
#include "gpu/programs.h"
#include "plan/plan.h"
#include "shim.h"

namespace optfuse::recorded {
namespace {

// The kernels of a plan of no optimizer, for the life of the process.
of_plan *kernels() {
    static of_plan *const core = [] {
        const char *isa = std::getenv("OPTFUSE_ISA");
        of_shim_plan *handle = nullptr;
        check(of_shim_plan_new("programs", OF_FORWARD, isa == nullptr ? "" : isa, 0, 1, &handle));
        return plan_of(handle)->core;
    }();
    return core;
}

// Whole vectors of every width, and a tail; on a GPU, where there may be one other bit in some
// thousand numbers, many of them.
int64_t tried_on(const c10::Device &device) { return device.is_cpu() ? 203 : 16411; }

// Numbers of all magnitudes, then some that operators treat apart. which: others for each operand.
at::Tensor numbers(at::ScalarType dtype, const c10::Device &device, unsigned which) {
    const int64_t n = tried_on(device);
    at::Tensor made = at::empty({n}, at::TensorOptions().dtype(at::kDouble));
    auto *x = made.mutable_data_ptr<double>();
    uint64_t state = 0x9E3779B97F4A7C15ull * (which + 1);
    for (int64_t i = 0; i < n; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        const double unit = static_cast<double>(state >> 11) * 0x1p-53;
        const auto power = static_cast<int>(state % 24) - 16;
        x[i] = std::ldexp(unit + 0.5, power) * ((state >> 7 & 3) == 0 ? -1.0 : 1.0);
    }
    constexpr double inf = std::numeric_limits<double>::infinity();
    const double apart[] = {0.0, -0.0, inf, -inf, NAN, 1.0, -1.0, 1e-40, -3e-42, 5e-8};
    for (size_t i = 0; i < 40; i++)
        x[static_cast<size_t>(n) - 1 - i * 5] = apart[(i * (which + 1) + which) % 10];
    return (dtype == at::kBool ? made.gt(0) : made.to(dtype)).to(device);
}

bool same_bits(const at::Tensor &a, const at::Tensor &b) {
    const at::Tensor both_nan = a.isnan().logical_and(b.isnan());
    const auto type = a.dtype().itemsize() == 2   ? at::kShort
                      : a.dtype().itemsize() == 4 ? at::kInt
                                                  : at::kLong;
    return a.view(type).eq(b.view(type)).logical_or(both_nan).all().item<bool>();
}

// The line at one place, on such numbers.
class Trial {
  public:
    // are_points: its tensors get a dimension, for more numbers.
    Trial(const Line &of, uint32_t at, const std::vector<c10::IValue> &its, bool are_points)
        : line(of), place(at), values(its), is_point(are_points) {}

    bool run() {
        for (uint32_t i = line.first; i < line.end; i++)
            given.push_back(replaced(values[i]));
        const auto n = static_cast<uint32_t>(given.size());
        const uint32_t results = line.results - line.first;
        const Line here{line.op, line.known, 0, results, n};
        Numbered numbered;
        numbered.read({here}, given);
        const auto instructions = translate(here, 0, given, numbered);
        if (instructions.empty() || instructions[0].dtype == at::kBool)
            return !instructions.empty(); // of booleans alone
        const at::Tensor by_program = run_instructions(instructions, numbered);
        torch::jit::Stack stack = arguments_of(here, given);
        line.op.callBoxed(stack);
        const c10::IValue &to = n > results ? stack[0] : given[line.known->target];
        const at::Tensor by_operator = to.isTensor() ? to.toTensor() : to.toTensorList().get(0);
        return same_bits(by_program, by_operator.to(by_program.scalar_type()));
    }

  private:
    at::Tensor replaced(const at::Tensor &tensor) {
        if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number())
            return tensor;
        at::Tensor &its = instead[tensor.unsafeGetTensorImpl()];
        if (!its.defined())
            its = numbers(tensor.scalar_type(), tensor.device(),
                          static_cast<unsigned>(instead.size()));
        if (tensor.dim() == 0 && its.dim() != 0 && !is_point)
            its = its[0].clone();
        return its;
    }

    c10::IValue replaced(const c10::IValue &value) {
        if (value.isTensor())
            return replaced(value.toTensor());
        if (value.isTensorList())
            return c10::List<at::Tensor>({replaced(value.toTensorList().get(place))});
        if (!value.isList())
            return value;
        c10::impl::GenericList one(value.toList().elementType());
        one.push_back(value.toListRef()[place]);
        return one;
    }

    // Runs them on copies, and returns the tensor that they write.
    at::Tensor run_instructions(const std::vector<Instruction> &instructions,
                                const Numbered &numbered) {
        const at::ScalarType dtype = instructions[0].dtype;
        std::map<uint32_t, at::Tensor> copies;
        of_part part = {{}, tried_on(instructions[0].device), *dtype_of(dtype), nullptr};
        std::map<uint32_t, unsigned char> places;
        const auto place_of = [&](uint32_t number) {
            const auto next = static_cast<unsigned char>(places.size());
            const auto [at, is_new] = places.emplace(number, next);
            if (is_new) {
                for (const auto &[_, tensor] : instead)
                    if (tensor.unsafeGetTensorImpl() == numbered.entries[number].impl)
                        copies[number] = tensor.to(dtype, false, true);
                part.memory[next] = copies.at(number).mutable_data_ptr();
            }
            return at->second;
        };
        std::vector<of_instruction> code;
        for (const Instruction &instruction : instructions) {
            of_instruction q = {};
            q.operation = static_cast<unsigned char>(instruction.operation);
            unsigned char *const from[] = {&q.a, &q.b, &q.c};
            for (size_t i = 0; i < instruction.n_from; i++)
                *from[i] = place_of(instruction.from[i]);
            q.to = place_of(instruction.to);
            q.s = instruction.s.in(given);
            q.t = instruction.t.in(given);
            code.push_back(q);
        }
        of_program program = {code.data(), code.size(), 0, 0, false};
        if (const char *wrong = of_program_check(&program))
            fail(std::string("optfuse: an instruction can't be run: ") + wrong);
        part.program = &program;
        const at::Tensor &result = copies.at(instructions[0].to);
        if (result.is_cpu())
            run_programs({part});
        else
            run_on_gpu(program, result.device(), part.dtype, {entry_of(part)});
        return result;
    }

    const Line &line;
    const uint32_t place;
    const std::vector<c10::IValue> &values;
    const bool is_point;
    std::vector<c10::IValue> given;
    std::map<const c10::TensorImpl *, at::Tensor> instead;
};

} // namespace

void run_programs(const std::vector<of_part> &parts) {
    check(of_plan_run_programs(kernels(), parts.data(), parts.size()));
}

of_gpu_entry entry_of(const of_part &part) {
    of_gpu_entry entry = {};
    entry.param = part.memory[OF_REGISTER_PARAM];
    entry.grad = part.memory[OF_REGISTER_GRAD];
    if (entry.grad == nullptr) // the kernels want one
        entry.grad = entry.param;
    for (size_t i = 0; i < OF_MAX_STATE; i++)
        entry.state[i] = part.memory[OF_REGISTER_STATE + i];
    entry.n = static_cast<size_t>(part.numel);
    return entry;
}

bool has_bits(const Line &line, uint32_t place, const std::vector<c10::IValue> &values,
              const std::vector<Instruction> &made) {
    using Key = std::tuple<const Known *, of_operator, size_t, at::ScalarType, at::ScalarType, bool,
                           int>;
    static std::mutex guards_all;
    static auto &all = *new std::map<Key, bool>;
    const std::lock_guard<std::mutex> lock(guards_all);
    const Instruction &first = made[0];
    const c10::Device &device = first.device;
    const auto [at, is_new] = all.emplace(
        Key{line.known, first.operation, made.size(), first.dtype, first.of_number, first.is_point,
            device.index()},
        false);
    if (!is_new)
        return at->second;
    const Relaxed relaxed;
    const of_dtype dtype = dtype_of(first.dtype).value_or(OF_FLOAT32); // of booleans
    bool has = false;
    // An operator may not take such numbers at all.
    const bool is_done = answers([&] {
        has = (device.is_cpu() || prepare_programs(device, dtype)) &&
              Trial(line, place, values, first.is_point).run();
    });
    return at->second = is_done && has;
}

} // namespace optfuse::recorded
