// SPDX-License-Identifier: BSD-3-Clause
// reader.h: an optimizer of Python, read by the interpreter's stable interface. Python is called
// where something has changed: the loader's Link (_link.py).
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "ledger/ledger.h"
#include "plan/owner.h"
#include "python/callback.h"
#include "python/objects.h"

namespace optfuse {

// The objects that an optimizer had when the plan was told, by identity. Written with the GIL.
struct Remembered {
    Objects params;                 // of each group
    Objects options;                // the entries of each group
    std::vector<of_object *> lists; // the lists of parameters among them
    Objects entries, values;        // of the state, and of its entries
    std::vector<Objects> of_slot;   // its entry and what is in that, where sync_slot() has told it
    bool knows_options = false;     // that are objects which can't become others
    bool knows_state = false;
    bool has_made = false; // backward mode: the updates since step() have used other entries, too
    bool must_prepare = false; // the loader has said so
    int traits = 0;            // of_shim_trait

    void must_tell_state() {
        knows_state = false;
        must_prepare = true;
    }
};

// The plan's owner. C++ holds weak references only, to the optimizer and to the loader's Link.
class PythonOwner final : public Owner {
  public:
    // scaled: a set, empty as long as no loss in the process has been scaled; lives for ever.
    PythonOwner(Plan &plan, of_object *optimizer, of_object *link, of_object *scaled);
    bool begin_backward(Plan *plan, bool only_adds) override;
    bool make_state(Plan *plan, size_t slot) override;
    bool await_reduction(Plan *plan) override;
    bool update(Plan *plan, size_t slot) override;
    bool update_final(Plan *plan, size_t slot) override;
    bool end_backward(Plan *plan) override;
    void close() override;

    Ledger ledger;
    Remembered known;

  private:
    friend class PythonReader;
    Plan &plan;
    of_object *optimizer_ref, *link_ref; // nullptr after close()
    of_object *const scaled;
};

// For one call of the ledger. Made and destroyed with the GIL; the functions take it where they
// need it.
class PythonReader final : public OptimizerReader, Pinned {
  public:
    // optimizer: or nullptr, for the one that is weakly known.
    explicit PythonReader(PythonOwner &its, of_object *its_optimizer = nullptr);
    ~PythonReader() { held.drop(); }
    bool is_alive() const;    // optimizer and link are there
    void check_alive() const; // throws if they are not
    void check_pass(bool only_adds);
    void await_reduction();
    void update(size_t slot);
    bool is_by_class() const { return has(OF_SHIM_BY_CLASS); }
    void update_alone(size_t slot);
    void end_pass();
    bool leaves_state(); // backward mode: whether missing state is left to step()
    // Raises in Python what end() has held back.
    void raise_held();

    Look look() override;
    bool has_same_params() override;
    void check_rebuild() override;
    void rebuild() override;
    void attach() override;
    size_t count_groups() override;
    std::vector<double> numbers(size_t group) override;
    void told_options() override;
    void tell_state() override;
    bool make_state(size_t slot) override;
    void sync_slot(size_t slot) override;
    void move_to_end(const std::vector<size_t> &slots) override;
    void drop_gradients() override;
    bool begin(Look *look, bool in_backward) override;
    void prepare(const Look &look) override;
    void end(bool done) override;
    void note_used() override;
    void confirmed(bool complained) override;
    std::string changed_attribute() override;
    std::vector<const void *> parameters() override;
    std::vector<size_t> groups_now() override;
    std::string changed_option(size_t then, size_t now) override;
    bool has_used_state(const Look &look) override;
    std::string changed_state(size_t slot) override;

    // As long as one exists the thread has the GIL, or has given it up: the ledger may work.
    class Gil {
      public:
        Gil(PythonReader &its, bool held) : reader(its), switches(held == (its.thread != nullptr)) {
            if (switches)
                reader.switch_gil();
        }
        ~Gil() {
            if (switches)
                reader.switch_gil();
        }
        Gil(const Gil &) = delete;
        Gil &operator=(const Gil &) = delete;

      private:
        PythonReader &reader;
        const bool switches;
    };

  private:
    void switch_gil() {
        void *const without = std::exchange(thread, nullptr);
        if (without == nullptr)
            thread = of_interpreter.save_thread();
        else
            of_interpreter.restore_thread(without);
    }
    // Calls a method of the link, with the GIL.
    template <typename... Arguments>
    of_object *ask(const char *method, const char *format, Arguments... arguments);
    template <typename... Arguments>
    bool is_so(const char *method, const char *format, Arguments... arguments);
    template <typename... Arguments>
    std::string text(const char *method, const char *format, Arguments... arguments);
    bool has(of_shim_trait trait) const { return (owner.known.traits & trait) != 0; }
    of_object *attribute(const char *name) const; // borrowed, or nullptr
    bool has_scale() const;
    bool is_same_state() const;
    bool remember_state(); // false: it is no dict, and never found the same
    bool has_same_options(of_object *groups) const;
    bool has_same_params_in_lists() const;
    of_object *entry_of(size_t slot) const; // borrowed, or nullptr
    template <typename Visit> bool each_list(const Visit &visit) const;
    bool has_params() const;
    void remember_options();

    PythonOwner &owner;
    const Ref optimizer_held, link;
    of_object *const optimizer;
    const bool scale;       // grad_scale or found_inf is there
    void *thread = nullptr; // its PyThreadState, while it is without the GIL
    struct Raised {
        of_object *type = nullptr, *value = nullptr, *trace = nullptr;
        void drop() const {
            for (of_object *const object : {type, value, trace})
                if (object != nullptr)
                    of_interpreter.drop(object);
        }
    };
    Raised held;
    bool is_constant = true; // the groups of numbers() since count_groups()
};

} // namespace optfuse
