// SPDX-License-Identifier: BSD-3-Clause
// operators.cpp: the operators through which Python finds out which parameters are alike, and
// gives those that are a program. `plan` is the address of an of_shim_plan.
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "arguments.h"
#include "error.h"
#include "plan.h"
#include "shim.h"

namespace optfuse {
namespace {

// Whether a step() may update its parameter. whole: gradients are still to come, and every
// parameter that requires one may get one.
bool takes_part(const Slot *slot, bool whole) {
    if (!whole)
        return slot->param->grad().defined();
    return (slot->wrappers.empty() ? slot->param : slot->wrappers.front())->requires_grad();
}

int64_t kind_of(const Slot *slot) {
    const c10::TensorImpl *param = slot->param;
    const auto dtype = static_cast<int64_t>(c10::typeMetaToScalarType(param->dtype()));
    const c10::Device device = param->device();
    const auto of_gpu = static_cast<int64_t>(device.is_cpu() ? 0 : device.index() + 1);
    const int64_t has_holes = param->is_non_overlapping_and_dense() ? 0 : 1 << 23;
    const int64_t has_strides = param->is_contiguous() ? 0 : 1 << 7;
    return static_cast<int64_t>(slot->index) << 32 | dtype << 24 | has_holes | of_gpu << 8 |
           has_strides | param->dim();
}

// Flat, for each parameter that this step may update: a word of its slot (from bit 32 on),
// dtype, whether it has holes (bit 23), device and, in the last byte, whether it is not contiguous
// and the number of dimensions, and, if by_shape, sizes and strides.
// To take(), until it returns false.
template <typename Take>
bool each_word(const Plan &plan, bool whole, bool by_shape, const Take &take) {
    for (const Slot *slot : plan.slots) {
        if (!takes_part(slot, whole))
            continue;
        if (!take(kind_of(slot)))
            return false;
        if (by_shape) {
            const auto sizes = slot->param->sizes(), strides = slot->param->strides();
            if (!std::all_of(sizes.begin(), sizes.end(), take) ||
                !std::all_of(strides.begin(), strides.end(), take))
                return false;
        }
    }
    return true;
}

std::vector<int64_t> kinds(int64_t address, bool whole, bool by_shape) {
    Plan &plan = plan_at(address);
    plan.kinds.clear();
    each_word(plan, whole, by_shape, [&](int64_t word) {
        plan.kinds.push_back(word);
        return true;
    });
    return plan.kinds;
}

// Whether counters still hold the values that a step has given them. Their version counters do not
// tell: a write through .data or NumPy leaves them as they are.
bool hold(at::TensorList counters, at::TensorList values) {
    return std::equal(counters.begin(), counters.end(), values.begin(), values.end(),
                      [](const at::Tensor &counter, const at::Tensor &value) {
                          return counter.device().is_cpu() && counter.numel() == 1 &&
                                 counter.dtype() == value.dtype() &&
                                 std::memcmp(counter.const_data_ptr(), value.const_data_ptr(),
                                             value.dtype().itemsize()) == 0;
                      });
}

// The slots of a cohort get the program of their updates from here on, with the state in
// set_state()'s order. slots: none if they are those that the cohort had before.
void give(int64_t address, int64_t cohort, const std::optional<std::vector<int64_t>> &slots,
          const std::shared_ptr<const Program> &program) {
    Plan &plan = plan_at(address);
    const auto number = static_cast<size_t>(cohort);
    if (slots) {
        for (const int64_t index : *slots)
            if (index < 0 || static_cast<size_t>(index) >= plan.slots.size())
                fail("optfuse: no parameter number " + std::to_string(index));
        plan.cohorts.resize(std::max(plan.cohorts.size(), number + 1));
        plan.cohorts[number] = *slots;
    }
    if (number >= plan.cohorts.size())
        fail("optfuse: no parameters are known to be alike");
    for (const int64_t index : plan.cohorts[number])
        plan.slots[static_cast<size_t>(index)]->program = program;
}

void set_program(int64_t address, int64_t cohort, const std::optional<std::vector<int64_t>> &slots,
                 const std::vector<int64_t> &code, const std::vector<double> &numbers) {
    give(address, cohort, slots, make_program(code, numbers));
}

// The same with calls of PyTorch's operators (make_parts()); forms: make_forms(); touches, writes:
// make_program().
void set_program_with_calls(int64_t address, int64_t cohort,
                            const std::optional<std::vector<int64_t>> &slots, int64_t n_registers,
                            int64_t touches, int64_t writes, const std::vector<int64_t> &forms,
                            const std::vector<std::string> &words, const std::vector<int64_t> &code,
                            const std::vector<double> &numbers) {
    const Forms made = make_forms(forms);
    give(address, cohort, slots,
         make_program(make_parts(words, code, numbers, made, n_registers), made,
                      static_cast<size_t>(n_registers), static_cast<unsigned>(touches),
                      static_cast<unsigned>(writes)));
}

} // namespace
} // namespace optfuse

bool of_shim_same_kinds(of_shim_plan *handle, bool whole, bool by_shape) {
    const optfuse::Plan *plan = optfuse::plan_of(handle);
    size_t n = 0;
    const auto is_next = [&](int64_t word) {
        return n < plan->kinds.size() && plan->kinds[n++] == word;
    };
    return optfuse::each_word(*plan, whole, by_shape, is_next) && n == plan->kinds.size();
}

bool of_shim_have_gradients(of_shim_plan *handle, size_t cohort) {
    const optfuse::Plan *plan = optfuse::plan_of(handle);
    if (cohort >= plan->cohorts.size())
        return false;
    const auto &slots = plan->cohorts[cohort];
    return std::all_of(slots.begin(), slots.end(), [plan](int64_t index) {
        const optfuse::Slot *slot = plan->slots[static_cast<size_t>(index)];
        return slot->wrappers.empty() && slot->param->grad().defined();
    });
}

TORCH_LIBRARY_FRAGMENT(optfuse, m) {
    m.def("kinds(int plan, bool whole, bool by_shape) -> int[]", optfuse::kinds);
    m.def("hold(Tensor[] counters, Tensor[] values) -> bool", optfuse::hold);
    m.def("set_program(int plan, int cohort, int[]? slots, int[] code, float[] numbers) -> ()",
          optfuse::set_program);
    m.def("set_program_with_calls(int plan, int cohort, int[]? slots, int n_registers, "
          "int touches, int writes, int[] forms, str[] words, int[] code, float[] numbers) -> ()",
          optfuse::set_program_with_calls);
}
