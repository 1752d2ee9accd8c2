// SPDX-License-Identifier: BSD-3-Clause
// ledger.h: what one plan was told of its optimizer, which stays the owner of parameters, options
// and state: whether that still holds, and whether it may change now.
#pragma once

#include <string>
#include <unordered_set>
#include <vector>

#include "base/pinned.h"
#include "ledger/reader.h"
#include "plan/plan.h"

namespace optfuse {

// The functions throw, and then the plan has been told nothing by halves: what was told of is
// told again. They are called without Python's GIL.
class Ledger : Pinned {
  public:
    explicit Ledger(Plan &its) : plan(its) {}

    // Tells the plan of all parameters and groups from the start. After a failure the next step
    // does it again.
    void rebuild(OptimizerReader &now);
    // look: at `now`, as of this moment.
    void step(OptimizerReader &now, Look look);
    // The same for one parameter.
    void step_slot(OptimizerReader &now, size_t slot, bool at_once);
    // False: the gradients are still there, for stock's zero_grad().
    bool zero_grad(OptimizerReader &now, bool has_same_params, bool may_drop);
    // The first gradient of a backward pass that updates is complete.
    void begin_pass(OptimizerReader &now, Look look);
    void make_state(OptimizerReader &now, size_t slot);
    void tell_options(OptimizerReader &now);
    // Options that are not the numbers of group `then`: the first; npos: none.
    size_t first_difference(size_t then, const std::vector<double> &numbers) const;
    // Refuses what was changed between backward() and step(), where stock would still obey it.
    // at_step: what this says, the next step() does not say again.
    void refuse_late_changes(OptimizerReader &now, const Look &look, bool at_step);
    void refuse_capture_without_backward() const;
    bool has_updated() const; // backward mode: what step() has not confirmed yet
    // The state has an entry for this slot that the plan's updates have put there.
    void note_entry(size_t slot) { inserted.push_back(slot); }

  private:
    void sync_params(OptimizerReader &now, Look *look);
    void tell(OptimizerReader &now, const Look &look);
    void note_used(OptimizerReader &now);
    void confirm(OptimizerReader &now);
    void put_in_order(OptimizerReader &now);
    int step_plan(OptimizerReader &now);
    void create_updates(OptimizerReader &now, Look look);
    void begin_final(OptimizerReader &now, Look look);
    bool counts_together() const;
    bool is_updated(size_t slot) const;
    std::vector<std::string> late_changes(OptimizerReader &now, const Look &look);
    void find_changed_groups(OptimizerReader &now, std::vector<std::string> *found);
    void find_changed_state(OptimizerReader &now, std::vector<std::string> *found);
    void find_written(std::vector<std::string> *found) const;

    Plan &plan;
    std::vector<std::vector<double>> numbers; // of each group
    std::vector<size_t> needs;                // room for step()
    bool has_begun = false;                   // since step(): a backward pass that may update
    std::vector<size_t> inserted;             // since step(): slots whose entry is new in the state
    std::vector<std::string> kept;            // changes from before rebuild()
    std::unordered_set<std::string> said;     // changes that an error has named
};

} // namespace optfuse
