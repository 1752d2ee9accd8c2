// SPDX-License-Identifier: BSD-3-Clause
#include "cxx/optimizer.h"

#include <ATen/Version.h>

#include <cstdlib>
#include <sstream>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "autograd/backward.h"
#include "base/compat.h"
#include "base/device.h"
#include "base/error.h"
#include "doors/gpu_reference.h"
#include "doors/gpu_trial.h"
#include "host/host.h"
#include "plan/refuse.h"
#include "plan/slots.h"

namespace optfuse {
namespace {

std::string label_of(const at::Tensor &param, size_t group, size_t index) {
    std::ostringstream label;
    label << "parameter " << index << " of group " << group;
    if (param.defined())
        label << " of shape " << param.sizes();
    return label.str();
}

void check_place(const at::Tensor &param, const std::string &label) {
    if (!param.defined())
        fail("optfuse: " + label + " is an undefined tensor: leave it out");
    if (!param.device().is_cpu() && !is_gpu(param.device()))
        fail("optfuse: " + label + " is on " + param.device().str() +
             ", where parameters have no fused update: keep the optimizer as it is");
}

} // namespace

FusedOptimizer::FusedOptimizer(torch::optim::Optimizer &its, const of_shim_fuse_options &options)
    : optimizer(its), row(class_of(its)), strict(options.strict) {
    const char *isa = std::getenv("OPTFUSE_ISA");
    check(of_shim_plan_new(row.rule, options.mode, isa == nullptr ? "" : isa, options.bucket_bytes,
                           options.accumulate, &handle));
    shared = plan_of(handle);
    shared->owner = this;
    ledger.emplace(*shared);
    try {
        ledger->rebuild(*this);
    } catch (...) {
        of_shim_plan_free(handle);
        throw;
    }
}

FusedOptimizer::~FusedOptimizer() {
    bool cleaned = false;
    of_shim_flush(handle, false, &cleaned); // what fails stays so: there is nobody to tell
    for (const Member &member : members)
        detach_gradient_hook(shared, member.param);
    of_shim_plan_free(handle);
}

// ---- parameters and groups

bool FusedOptimizer::has_same_params() {
    size_t slot = 0;
    const auto &groups = optimizer.param_groups();
    for (size_t g = 0; g < groups.size(); g++)
        for (const at::Tensor &param : groups[g].params()) {
            const bool is_next = slot < members.size() && members[slot].param.is_same(param) &&
                                 members[slot].group == g;
            if (!is_next)
                return false;
            slot++;
        }
    return slot == members.size() && groups.size() == n_groups;
}

namespace {

// PyTorch's add() for SVE has other bits in float16; in C++ no trial finds that (docs/numerics.md).
bool sve_rounds_otherwise(const of_rule &rule, of_dtype dtype) {
    const bool is_sve = at::get_cpu_capability().rfind("SVE", 0) == 0;
    return is_sve && dtype == OF_FLOAT16 && rule.op_by_op;
}

} // namespace

// Raises unless the update has the bits that docs/cxx.md says: where PyTorch is known to round
// otherwise always, where its release or a GPU may do so under strict.
void FusedOptimizer::check_bits(const at::Tensor &param,
                                const torch::optim::OptimizerOptions &options,
                                const std::string &label) const {
    of_dtype dtype;
    if (!dtype_of(param.unsafeGetTensorImpl(), &dtype))
        return; // refused by its dtype
    if (!is_gpu(param.device())) {
        if (sve_rounds_otherwise(*shared->rule, dtype))
            fail("optfuse: PyTorch runs its " + at::get_cpu_capability() +
                 " kernels on this processor, which round float16 otherwise than the update of " +
                 label + ": set ATEN_CPU_CAPABILITY=default before the program starts, or "
                 "keep the optimizer as it is");
        const int last = row.same_16_bits_up_to;
        if (strict && of_dtype_size(dtype) == 2 && last != 0 && OF_TORCH_AT_LEAST(last + 1))
            fail("optfuse: Options::strict, but " + label + " is " + of_dtype_name(dtype) +
                 ", and torch 2." + std::to_string(TORCH_VERSION_MINOR) + " rounds " + row.name +
                 "'s update there otherwise than this one: leave strict out, or keep the "
                 "optimizer as it is");
        return;
    }
    if (gpu_bits_differ(*shared->rule, row.hyper(options), param.options(), label, false) && strict)
        fail("optfuse: Options::strict, but the update of " + label + " has other bits than " +
             gpu_reference(row.rule).name + " on " + param.device().str() +
             ": leave strict out, or keep the optimizer as it is");
}

std::vector<FusedOptimizer::Member> FusedOptimizer::members_now() const {
    std::vector<Member> found;
    std::unordered_set<const c10::TensorImpl *> known;
    const auto &groups = optimizer.param_groups();
    for (size_t g = 0; g < groups.size(); g++)
        for (size_t i = 0; i < groups[g].params().size(); i++) {
            const at::Tensor &param = groups[g].params()[i];
            check_place(param, label_of(param, g, i));
            check_bits(param, groups[g].options(), label_of(param, g, i));
            if (!known.insert(param.unsafeGetTensorImpl()).second)
                fail("optfuse: " + label_of(param, g, i) +
                     " is in the optimizer twice: leave it in one place");
            found.push_back({param, g, 0});
        }
    return found;
}

void FusedOptimizer::rebuild() {
    std::vector<Member> found = members_now();
    std::unordered_set<const c10::TensorImpl *> known;
    std::unordered_map<const c10::TensorImpl *, uint64_t> used;
    for (const Member &member : found)
        known.insert(member.param.unsafeGetTensorImpl());
    for (const Slot *slot : shared->slots)
        if (of_shim_is_updated(handle, slot->index))
            used[slot->param] = slot->used;
    check(of_shim_clear(handle));
    for (const Member &member : std::exchange(members, {}))
        if (known.count(member.param.unsafeGetTensorImpl()) == 0)
            detach_gradient_hook(shared, member.param);
    n_groups = optimizer.param_groups().size();
    ledger->tell_options(*this);
    add_members(std::move(found));
    for (Slot *slot : shared->slots)
        if (const auto its = used.find(slot->param); its != used.end())
            set_used(*slot, its->second);
}

void FusedOptimizer::add_members(std::vector<Member> found) {
    size_t index = 0;
    for (size_t i = 0; i < found.size(); i++) {
        const Member &member = found[i];
        index = i != 0 && found[i - 1].group == member.group ? index + 1 : 0;
        const c10::TensorImpl *impl = member.param.unsafeGetTensorImpl();
        of_dtype dtype = OF_FLOAT32;
        dtype_of(impl, &dtype);
        add_slot(*shared, member.param, member.group, false, place_of(impl, dtype),
                 label_of(member.param, member.group, index));
        if (check_param(shared->slots.back(), impl, &dtype) == OF_FOUND_ERROR) {
            const std::string why = of_error_message();
            of_shim_clear(handle);
            fail("optfuse: " + why);
        }
    }
    members = std::move(found);
    if (shared->mode == OF_BACKWARD)
        attach();
}

void FusedOptimizer::attach() {
    std::vector<at::Tensor> params;
    for (const Member &member : members)
        params.push_back(member.param);
    optfuse::attach(*shared, params);
}

std::vector<double> FusedOptimizer::numbers(size_t group) {
    return row.hyper(optimizer.param_groups()[group].options());
}

std::vector<const void *> FusedOptimizer::parameters() {
    std::vector<const void *> found;
    for (const Member &member : members)
        found.push_back(member.param.unsafeGetTensorImpl());
    return found;
}

std::vector<size_t> FusedOptimizer::groups_now() {
    std::vector<size_t> found(members.size(), kNoGroup);
    const auto &groups = optimizer.param_groups();
    for (size_t slot = 0; slot < members.size(); slot++)
        for (size_t g = 0; g < groups.size(); g++)
            for (const at::Tensor &param : groups[g].params())
                if (param.is_same(members[slot].param))
                    found[slot] = g;
    return found;
}

std::string FusedOptimizer::changed_option(size_t then, size_t now) {
    const size_t i = ledger->first_difference(then, numbers(now));
    return i < shared->rule->n_hyper ? shared->rule->hyper[i] : "";
}

// ---- the two schedules

void FusedOptimizer::end(bool done) {
    if (!done)
        return;
    write_counters();
    if (of_shim_inputs_are_profiled()) // profilers look at addresses, past the dispatcher
        flush();
}

void FusedOptimizer::step() {
    ledger->step(*this, look());
}

void FusedOptimizer::zero_grad(bool set_to_none) {
    if (!ledger->zero_grad(*this, has_same_params(), set_to_none))
        optimizer.zero_grad(set_to_none);
}

void FusedOptimizer::flush() {
    bool cleaned = false;
    check(of_shim_flush(handle, false, &cleaned));
}

bool FusedOptimizer::begin_backward(Plan *, bool only_adds) {
    return only_adds || answers([&] { ledger->begin_pass(*this, look()); });
}

bool FusedOptimizer::make_state(Plan *, size_t slot) {
    return answers([&] { ledger->make_state(*this, slot); });
}

// So that who saves the optimizer between backward() and step() sees counters that go with the
// state.
bool FusedOptimizer::end_backward(Plan *) {
    const std::lock_guard<std::recursive_mutex> guard(shared->telling);
    write_counters();
    return true;
}

} // namespace optfuse
