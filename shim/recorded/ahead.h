// SPDX-License-Identifier: BSD-3-Clause
// ahead.h: backward mode. At the first complete gradient of a backward pass step() runs once, with
// tensors that stand for the gradients still to come, and none of its lines runs. Each line belongs to
// one parameter, whose lines run when its gradient is there: as a program of the core's, if they are
// one. Whether a step() can do without all others
// is found out in the steps before, which run as ever: no line may combine two parameters, and step()
// may do nothing that needs a number of a gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "recorded/tape.h"

namespace optfuse::recorded {

// One parameter's part of a step().
struct Part {
    at::Tensor stand_in; // for its gradient; undefined: step() has seen none
    std::vector<Line> lines;
    std::vector<c10::IValue> values;
};

// That of a gradient, or of a parameter.
struct Geometry {
    bool is_there = false;
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype = at::kFloat;
    c10::Device device = c10::kCPU;
};

// One optimizer's. Guarded by Plan::telling, and between two passes by Plan::alone; run() by the core's
// lock.
class Ahead final : public Lines {
  public:
    // Around a step() that runs as ever, WATCHED: before it is called, before its lines run, and after.
    void begin_watched(const Plan &plan, Tape *its);
    void end_watched(const Plan &plan, const Tape &its);
    void look_for_kept(const Plan &plan);

    // Whether the next step() can run at the beginning of this backward pass: the last one could have,
    // and the pass brings gradients to the same parameters.
    bool can_begin(const Plan &plan) const;
    // Whether it has, for this pass: each GPU's thread of the engine may ask.
    bool has_begun_here() const;
    // By slot, undefined where no gradient comes.
    std::vector<at::Tensor> stand_ins(const Plan &plan);
    // Between these two step() is called, AHEAD. end_step() raises if it can't have been; fail_step():
    // it has raised itself.
    Tape *tape() { return its_tape.get(); }
    void end_step(const Plan &plan);
    void fail_step();
    bool has_begun() const { return its_tape != nullptr; }
    // On GPUs: the current device and the settings of the last step(), on whose thread this is not.
    std::optional<c10::Device> device;
    Settings of_step;
    // Whether step() has seen a gradient of the parameter.
    bool owns(size_t slot) const;
    bool knows_all_users(const Slot &slot) const override;
    void run(size_t slot, const at::Tensor &gradient) override;

    // Slots whose gradient has not come, or is one that step() has not seen.
    std::vector<size_t> unexpected(const Plan &plan) const;
    // The addresses of small tensors to which somebody has written since then.
    std::vector<int64_t> written_numbers() const;
    // step() is called: small tensors get what it has written to them at once.
    void confirm();
    // Its lines have run, or are given up. With the GIL.
    void end();

    std::string why; // the last step() could not have run ahead; empty: it could
    int n_watched = 0; // steps that were watched, one after the other: the first makes the state

  private:
    void hide_numbers();
    void hand_over(Slot *slot, std::vector<std::shared_ptr<const Program>> *known);

    std::vector<Geometry> gradients, params; // of the last step() that was watched
    std::unique_ptr<Tape> its_tape;
    std::vector<Part> parts;
    std::vector<Undo> not_hidden; // of small tensors that are ahead
    Settings settings;
    int64_t graph_task = -1; // the pass
};

// The plan's, made where there is none.
Ahead &ahead_of(Plan &plan);
// Null: there is none.
inline Ahead *ahead_in(const Plan &plan) { return static_cast<Ahead *>(plan.ahead.get()); }

} // namespace optfuse::recorded
