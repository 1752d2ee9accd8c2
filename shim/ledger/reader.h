// SPDX-License-Identifier: BSD-3-Clause
// reader.h: an optimizer as it is now, for the ledger, which knows what the plan was told.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace optfuse {

// The parts that are still as the plan was told. False may mean that it can't be seen quickly.
struct Look {
    bool params;
    bool groups; // and their options
    bool state;
};

// An optimizer of Python (loader/reader.h) or of a C++ program (cxx/optimizer.h). The functions
// throw; the ledger calls them without Python's GIL, and under none of the core's locks.
struct OptimizerReader {
    virtual Look look() = 0;
    virtual bool has_same_params() = 0;

    virtual void check_rebuild() {}
    // Tells the plan of all groups (Ledger::tell_options()), parameters and hooks from the start.
    virtual void rebuild() = 0;
    virtual void attach() = 0;
    virtual size_t count_groups() = 0;
    // The options of a group, in the order of the rule.
    virtual std::vector<double> numbers(size_t group) = 0;
    virtual void told_options() {}
    // Tells the plan of the state's entries that are others than it knows.
    virtual void tell_state() = 0;
    // Makes and tells the entry of a slot, as stock does at a parameter's first gradient. Whether
    // the state had none.
    virtual bool make_state(size_t slot) = 0;
    // Tells the plan of the options and the state of a slot, if they are others than it knows.
    virtual void sync_slot(size_t /* slot */) {}
    // Moves these entries to the end of the state, one after the other.
    virtual void move_to_end(const std::vector<size_t> &) {}
    virtual void drop_gradients() = 0;

    // Around a step, or at the beginning of a backward pass that updates. begin() comes before
    // options and state are told, and may change what look() has said; false: the optimizer's own
    // step() has been taken. prepare() comes after, end() after the step that begin() was for.
    virtual bool begin(Look *, bool /* in_backward */) { return true; }
    virtual void prepare(const Look &) {}
    virtual void end(bool /* done */) {}

    // ---- between backward() and step(): what updates have used, and is other now

    // From here on updates use what is there now.
    virtual void note_used() {}
    // All has been used. complained: an error has named a change.
    virtual void confirmed(bool /* complained */) {}
    // An attribute of the optimizer: the change as a sentence; empty: none.
    virtual std::string changed_attribute() { return ""; }
    // The parameters of all slots, by address, as rebuild() has found them.
    virtual std::vector<const void *> parameters() = 0;
    // The group of each slot's parameter; kNoGroup: none.
    static constexpr size_t kNoGroup = static_cast<size_t>(-1);
    virtual std::vector<size_t> groups_now() = 0;
    // The name of an option of group `now` that is other than group `then` had it; empty: none.
    virtual std::string changed_option(size_t then, size_t now) = 0;
    // Seen quickly: that of note_used().
    virtual bool has_used_state(const Look &) { return false; }
    // The slot's entry, as a sentence; empty: none.
    virtual std::string changed_state(size_t slot) = 0;

  protected:
    ~OptimizerReader() = default;
};

} // namespace optfuse
