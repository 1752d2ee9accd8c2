// SPDX-License-Identifier: BSD-3-Clause
// optimizer.h: a fused optimizer of a C++ program, which stays the owner of options and state.
#pragma once

#include <torch/optim/optimizer.h>

#include <optional>
#include <string>
#include <vector>

#include "cxx/classes.h"
#include "cxx/fused.h"
#include "ledger/ledger.h"
#include "plan/owner.h"
#include "plan/plan.h"
#include "plan/slots.h"

namespace optfuse {

// All functions but those of Owner throw optfuse::Error.
class FusedOptimizer final : public Owner, private OptimizerReader, Pinned {
  public:
    FusedOptimizer(torch::optim::Optimizer &its, const of_shim_fuse_options &options);
    ~FusedOptimizer();

    void step();
    void zero_grad(bool set_to_none);
    void flush();
    of_shim_plan *plan() const { return handle; }

    bool begin_backward(Plan *plan, bool only_adds) override;
    bool make_state(Plan *plan, size_t slot) override;
    bool end_backward(Plan *plan) override;

  private:
    struct Member { // one for each slot
        at::Tensor param;
        size_t group;
        // The entry's counter when entry and plan were last the same; the plan counts in a
        // tensor, as PyTorch's fused updates do.
        int64_t step;
    };

    // OptimizerReader: what the program can change between two steps
    Look look() override { return {has_same_params(), false, false}; }
    bool has_same_params() override;
    void rebuild() override;
    void attach() override;
    size_t count_groups() override { return optimizer.param_groups().size(); }
    std::vector<double> numbers(size_t group) override;
    void tell_state() override;
    bool make_state(size_t slot) override;
    void drop_gradients() override { optfuse::drop_gradients(*shared); }
    void end(bool done) override;
    std::vector<const void *> parameters() override;
    std::vector<size_t> groups_now() override;
    std::string changed_option(size_t then, size_t now) override;
    std::string changed_state(size_t slot) override;

    std::vector<Member> members_now() const;
    void check_bits(const at::Tensor &param, const torch::optim::OptimizerOptions &options,
                    const std::string &label) const;
    void add_members(std::vector<Member> found);
    void tell_entry(size_t slot, const std::optional<StateEntry> &entry, bool is_new);
    std::optional<StateEntry> entry_of(size_t slot) const;
    bool is_told(size_t slot, const std::optional<StateEntry> &entry) const;
    void write_counters();

    torch::optim::Optimizer &optimizer;
    const CxxClass &row;
    const bool strict;
    of_shim_plan *handle = nullptr;
    Plan *shared = nullptr; // the plan behind the handle
    std::optional<Ledger> ledger;
    std::vector<Member> members;
    size_t n_groups = 0; // as the plan was told
};

} // namespace optfuse
