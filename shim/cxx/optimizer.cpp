// SPDX-License-Identifier: BSD-3-Clause
#include "cxx/optimizer.h"

#include <cstdlib>
#include <sstream>
#include <unordered_set>
#include <utility>

#include "autograd/backward.h"
#include "compat.h"
#include "cxx/gpu_reference.h"
#include "cxx/gpu_trial.h"
#include "error.h"
#include "gpu/device.h"
#include "guard.h"
#include "slots.h"
#include "tensor/refuse.h"

namespace optfuse {
namespace {

// From functions of shim.h.
void check_status(int status) {
    check(static_cast<of_status>(status));
}

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

template <typename Work> bool answers(const Work &work) {
    try {
        work();
        return true;
    } catch (const c10::Error &e) {
        of_set_error("%s", e.what_without_backtrace());
    } catch (const std::exception &e) {
        std::string text = e.what();
        if (text.rfind("optfuse: ", 0) == 0) // whoever asks puts it in front
            text.erase(0, 9);
        of_set_error("%s", text.c_str());
    }
    return false;
}

} // namespace

FusedOptimizer::FusedOptimizer(torch::optim::Optimizer &its, const of_shim_fuse_options &options)
    : optimizer(its), row(class_of(its)), strict(options.strict),
      defers_on_gpu(options.defer_on_gpu) {
    const char *isa = std::getenv("OPTFUSE_ISA");
    check_status(of_shim_plan_new(row.rule, options.mode, isa == nullptr ? "" : isa,
                                  options.bucket_bytes, options.accumulate, &handle));
    shared = plan_of(handle);
    shared->owner = this;
    try {
        rebuild();
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

bool FusedOptimizer::has_same_params() const {
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
    return slot == members.size() && groups.size() == hyper.size();
}

// Which are those of docs/cxx.md, or strict refuses it.
void FusedOptimizer::check_bits(const at::Tensor &param,
                                const torch::optim::OptimizerOptions &options,
                                const std::string &label) const {
    of_dtype dtype;
    if (!dtype_of(param.unsafeGetTensorImpl(), &dtype))
        return; // refused by its dtype
    if (!is_gpu(param.device())) {
        const int last = row.same_16_bits_up_to;
        if (strict && of_dtype_size(dtype) == 2 && last != 0 && OF_TORCH_AT_LEAST(last + 1))
            fail("optfuse: Options::strict, but " + label + " is " + of_dtype_name(dtype) +
                 ", and torch 2." + std::to_string(TORCH_VERSION_MINOR) + " rounds " + row.name +
                 "'s update there otherwise than this one: leave strict out, or keep the "
                 "optimizer as it is");
        return;
    }
    if (gpu_bits_differ(*shared->rule, row.hyper(options), param, label) && strict)
        fail("optfuse: Options::strict, but the update of " + label + " has other bits than " +
             gpu_reference(row.rule).name + " on " + param.device().str() +
             ": leave strict out, or keep the optimizer as it is");
}

// Tells the plan about all parameters and groups from the start. After a failure the next step
// does it again.
void FusedOptimizer::rebuild() {
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
    check_status(of_shim_clear(handle));
    for (const Member &member : std::exchange(members, {}))
        if (known.count(member.param.unsafeGetTensorImpl()) == 0)
            detach_gradient_hook(shared, member.param);
    hyper.clear();
    tell_options();
    add_members(std::move(found));
}

// A replay of a CUDA graph reads parameters and writes gradients by their addresses. Python's
// optfuse puts a flush before torch.cuda.CUDAGraph.replay(); C++ programs call a function that
// nothing can be put before. Nor is a capture always seen: parameters without a pending update have
// no mark, and the graph may be older than the optimizer.
bool FusedOptimizer::is_eager(const at::Tensor &param) const {
    return shared->mode == OF_FORWARD && is_gpu(param.device()) && !defers_on_gpu &&
           OF_GUARD(replays);
}

void FusedOptimizer::add_members(std::vector<Member> found) {
    size_t index = 0;
    for (size_t i = 0; i < found.size(); i++) {
        const Member &member = found[i];
        index = i != 0 && found[i - 1].group == member.group ? index + 1 : 0;
        const c10::TensorImpl *impl = member.param.unsafeGetTensorImpl();
        of_dtype dtype = OF_FLOAT32;
        dtype_of(impl, &dtype);
        add_slot(*shared, member.param, member.group, is_eager(member.param),
                 place_of(impl, dtype), label_of(member.param, member.group, index));
        if (check_param(shared->slots.back(), impl, &dtype) == OF_FOUND_ERROR) {
            const std::string why = of_error_message();
            of_shim_clear(handle);
            fail("optfuse: " + why);
        }
    }
    members = std::move(found);
    needs.resize(members.size());
    if (shared->mode == OF_BACKWARD)
        attach_hooks();
}

void FusedOptimizer::attach_hooks() {
    std::vector<at::Tensor> params;
    for (const Member &member : members)
        params.push_back(member.param);
    attach(*shared, params);
}

// ---- options

// Between backward() and step(), where stock would still obey it.
std::vector<std::string> FusedOptimizer::late_changes() const {
    if (!has_same_params())
        return {"param_groups() were changed"};
    std::vector<std::string> found;
    const auto &groups = optimizer.param_groups();
    for (size_t g = 0; g < hyper.size(); g++)
        if (row.hyper(groups[g].options()) != hyper[g])
            found.push_back("an option of parameter group " + std::to_string(g) +
                            " (such as lr) was changed");
    for (size_t slot = 0; slot < members.size(); slot++)
        if (of_shim_is_updated(handle, slot) && !is_told(slot, entry_of(slot)))
            found.push_back("the state of " + shared->slots[slot]->label + " was replaced");
    bool of_state = false;
    for (size_t slot = of_shim_written(handle, 0, &of_state); slot != SIZE_MAX;
         slot = of_shim_written(handle, slot + 1, &of_state))
        found.push_back((of_state ? "the state of " : "") + shared->slots[slot]->label +
                        " was written in place");
    return found;
}

// at_step: what this says, the next step() does not say again.
void FusedOptimizer::refuse_late_changes(bool at_step) {
    if (shared->mode != OF_BACKWARD || !of_shim_unconfirmed(handle))
        return;
    const std::vector<std::string> found = late_changes();
    std::string first;
    for (const std::string &text : found)
        if (first.empty() && said.count(text) == 0)
            first = text;
    if (first.empty())
        return;
    if (at_step)
        said.insert(found.begin(), found.end());
    fail("optfuse: " + first +
         " between backward() and step(), but backward fusion has already updated with the old "
         "value; do this after step(), or use forward mode. The update stands, and the next step() "
         "confirms it");
}

void FusedOptimizer::tell_options() {
    const auto &groups = optimizer.param_groups();
    for (size_t g = 0; g < groups.size(); g++) {
        std::vector<double> now = row.hyper(groups[g].options());
        if (g < hyper.size() && hyper[g] == now)
            continue;
        check_status(of_shim_group(handle, g, now.data(), now.size()));
        if (g == hyper.size())
            hyper.emplace_back();
        hyper[g] = std::move(now);
    }
}

// ---- the two schedules

int FusedOptimizer::step_plan() {
    size_t missing = 0;
    const int status = of_shim_step(handle, needs.data(), needs.size(), &missing);
    if (status != OF_NEEDS_STATE)
        return status;
    for (size_t i = 0; i < missing; i++)
        make_entry(needs[i]);
    return of_shim_step(handle, needs.data(), needs.size(), &missing);
}

void FusedOptimizer::step() {
    refuse_late_changes(true);
    if (said.empty() && !has_same_params())
        rebuild();
    const bool same_params = said.empty() || has_same_params();
    const int todo = shared->mode == OF_BACKWARD ? of_shim_todo(handle) : OF_SHIM_UPDATE;
    if (same_params && (todo & OF_SHIM_UPDATE) != 0) { // else the next backward does it
        tell_options();
        tell_state();
    }
    if ((todo & OF_SHIM_ATTACH) != 0)
        attach_hooks();
    check_status(step_plan());
    said.clear();
    if (!same_params)
        rebuild();
    write_counters();
    if (of_shim_inputs_are_profiled()) // profilers look at addresses, past the dispatcher
        flush();
}

void FusedOptimizer::zero_grad(bool set_to_none) {
    if (of_shim_unconfirmed(handle))
        fail("optfuse: zero_grad() before step(): backward fusion has already applied the "
             "gradients that this would discard. Call step() after each backward(); run passes "
             "that only add to the gradients, or whose gradients are thrown away, under an "
             "optfuse::Accumulate; or use forward mode");
    if (shared->mode == OF_BACKWARD) {
        if (!has_same_params())
            rebuild();
        of_shim_restart_count(handle);
    }
    if (set_to_none && has_same_params())
        of_shim_drop_gradients(handle);
    else
        optimizer.zero_grad(set_to_none);
}

void FusedOptimizer::flush() {
    bool cleaned = false;
    check_status(of_shim_flush(handle, false, &cleaned));
}

bool FusedOptimizer::begin_backward(Plan *, bool only_adds) {
    if (only_adds)
        return true;
    return answers([&] {
        const std::lock_guard<std::mutex> guard(telling);
        if (!has_same_params())
            fail("param_groups() have other parameters than at the last step(), which a backward "
                 "pass can't start to update; call zero_grad() after changing them. Nothing was "
                 "updated");
        refuse_late_changes(false);
        tell_options();
        tell_state();
    });
}

bool FusedOptimizer::make_state(Plan *, size_t slot) {
    return answers([&] {
        const std::lock_guard<std::mutex> guard(telling);
        make_entry(slot);
    });
}

// So that who saves the optimizer between backward() and step() sees counters that go with the
// state.
void FusedOptimizer::end_backward(Plan *) {
    const std::lock_guard<std::mutex> guard(telling);
    write_counters();
}

} // namespace optfuse
