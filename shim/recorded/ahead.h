// SPDX-License-Identifier: BSD-3-Clause
// ahead.h: backward mode. At the first complete gradient of a backward pass step() runs once, with
// tensors that stand for the gradients still to come, and none of its lines runs. Each line belongs to
// one parameter, whose lines run when its gradient is there. Whether a step() can do without all others
// is found out in the steps before, which run as ever: no line may combine two parameters, and step()
// may do nothing that needs a number of a gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "recorded/tape.h"

namespace optfuse {
struct Plan;
struct Slot;
}

namespace optfuse::recorded {

// One parameter's part of a step().
struct Part {
    at::Tensor stand_in; // for its gradient; undefined: step() has seen none
    std::vector<Line> lines;
    std::vector<c10::IValue> values;
    bool has_run = false;
};

// The form of a gradient.
struct Gradient {
    bool is_there = false;
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype = at::kFloat;

    bool operator==(const Gradient &o) const {
        return is_there == o.is_there && sizes == o.sizes && strides == o.strides &&
               dtype == o.dtype;
    }
};

// One optimizer's. Guarded by Plan::telling, and between two passes by Plan::alone; run() by the core's
// lock.
class Ahead {
  public:
    // Around a step() that runs as ever, WATCHED: before it is called, before its lines run, and after.
    void begin_watched(const Plan &plan, Tape *its);
    void end_watched(const Plan &plan, const Tape &its);
    void look_for_kept(const Plan &plan);

    // Whether the next step() can run at the beginning of this backward pass: the last one could have,
    // and the pass brings gradients to the same parameters.
    bool can_begin(const Plan &plan) const;
    // By slot, undefined where no gradient comes.
    std::vector<at::Tensor> stand_ins(const Plan &plan);
    // Between these two step() is called, AHEAD. end_step() raises if it can't have been.
    Tape *tape() { return its_tape.get(); }
    void end_step(const Plan &plan);
    bool has_begun() const { return its_tape != nullptr; }
    // Whether step() has seen a gradient of the parameter. run(): its update, once it is there.
    bool owns(size_t slot) const;
    // Whether nobody but its lines, its owner and the core holds the memory of the parameter and its
    // state.
    bool knows_all_users(const Slot &slot) const;
    void run(size_t slot, const at::Tensor &gradient);

    // Slots whose gradient has not come, or is one that step() has not seen.
    std::vector<size_t> unexpected(const Plan &plan) const;
    // The storages of these tensors get the numbers of before step().
    void put_back(at::TensorList tensors);
    // step() has been called; or its lines are given up. With the GIL.
    void end();

    std::string why; // the last step() could not have run ahead; empty: it could
    bool is_known = false; // a step() was watched

  private:
    std::vector<Gradient> gradients; // of the last step() that was watched
    std::unique_ptr<Tape> its_tape;
    std::vector<Part> parts;
    Settings settings;
};

} // namespace optfuse::recorded
