// SPDX-License-Identifier: BSD-3-Clause
// optimizer.h: a fused optimizer of a C++ program, which stays the owner of options and state.
#pragma once

#include <torch/optim/optimizer.h>

#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "cxx/classes.h"
#include "cxx/fused.h"
#include "owner.h"
#include "plan.h"

namespace optfuse {

// What the program can change between two steps is compared with what the plan was told: the
// parameters of the groups, their options, and the state's entries. All functions but those of
// Owner throw optfuse::Error.
class FusedOptimizer final : public Owner {
  public:
    FusedOptimizer(torch::optim::Optimizer &its, const of_shim_fuse_options &options);
    ~FusedOptimizer();
    FusedOptimizer(const FusedOptimizer &) = delete;
    FusedOptimizer &operator=(const FusedOptimizer &) = delete;

    void step();
    void zero_grad(bool set_to_none);
    void flush();
    of_shim_plan *plan() const { return handle; }

    bool begin_backward(Plan *plan, bool only_adds) override;
    bool make_state(Plan *plan, size_t slot) override;
    bool await_reduction(Plan *) override { return true; }
    void end_backward(Plan *plan) override;

  private:
    struct Member { // one for each slot
        at::Tensor param;
        size_t group;
        // The entry's counter when entry and plan were last the same; the plan counts in a
        // tensor, as PyTorch's fused updates do.
        int64_t step;
    };

    bool has_same_params() const;
    bool is_eager(const at::Tensor &param) const;
    void check_bits(const at::Tensor &param, const torch::optim::OptimizerOptions &options,
                    const std::string &label) const;
    void rebuild();
    void add_members(std::vector<Member> found);
    void attach_hooks();
    std::vector<std::string> late_changes() const;
    void refuse_late_changes(bool at_step);
    void tell_options();
    void tell_state();
    void tell_entry(size_t slot, const std::optional<StateEntry> &entry, bool is_new);
    std::optional<StateEntry> entry_of(size_t slot) const;
    bool is_told(size_t slot, const std::optional<StateEntry> &entry) const;
    void write_counters();
    void make_entry(size_t slot);
    int step_plan();

    torch::optim::Optimizer &optimizer;
    const CxxClass &row;
    const bool strict;
    const bool defers_on_gpu;
    of_shim_plan *handle = nullptr;
    Plan *shared = nullptr; // the plan behind the handle
    std::vector<Member> members;
    std::vector<std::vector<double>> hyper; // of each group
    std::vector<size_t> needs;              // room for step()
    // Messages since the last step() that was not refused.
    std::unordered_set<std::string> said;
    std::mutex telling;                     // what the plan is told inside backward
};

} // namespace optfuse
