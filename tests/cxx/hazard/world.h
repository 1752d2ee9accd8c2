// SPDX-License-Identifier: BSD-3-Clause
// world.h: the objects that a program acts on. One world a run: with the reference, in forward
// mode or in backward mode.
#pragma once

#include "hazard/kinds.h"
#include "optfuse.hpp"

#include <array>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace hazard {

enum class Play { stock, forward, backward };

struct Setup {
    std::vector<unsigned> shapes; // of parameters: rows of world.cpp's table
    std::vector<unsigned> kinds;  // of optimizers; two divide the parameters between them
    unsigned variant = 0;
    unsigned groups = 1; // of each optimizer
    size_t passes = 1;
    size_t bucket_bytes = 1;
};

struct Trained { // an optimizer
    const Kind *kind;
    std::unique_ptr<optim::Optimizer> optimizer;
    std::optional<optfuse::Fused> fused; // none: the reference's step()
    bool in_backward = false;            // the mode
    bool unsettled = false;              // a backward pass came after its last step()
    std::vector<Tensor> params() const;
    optim::OptimizerParamState *entry(const Tensor &param) const;
};

class World {
  public:
    World(const Setup &setup, Play play);

    Trained &at(unsigned i) { return trained[i % trained.size()]; }
    const Tensor &param(unsigned i) const { return params[i % params.size()]; }
    const std::vector<Tensor> &add_param(unsigned shape);
    bool is_fused() const { return play != Play::stock; }
    bool is_unsettled() const; // something has been updated before its step()

    Tensor loss(unsigned left_out, unsigned batch) const;
    void backward(const Tensor &loss, bool retains = false, bool creates = false);
    Tensor step(Trained &one, const optim::Optimizer::LossClosure &closure = nullptr);
    void zero_grad(Trained &one, bool set_to_none);
    void fuse(Trained &one, bool in_other_mode);
    void flush(Trained &one);

    void see(const std::string &name, const Tensor &value);
    void see_weights_and_state();

    const Setup setup;
    const Play play;
    std::vector<Tensor> params, kept; // kept: they outlive the wrappers
    std::vector<Trained> trained;
    std::vector<Tensor> losses, held;
    std::vector<std::pair<std::string, Tensor>> seen;
    std::string label; // of the action, for what is seen
    bool in_backward = false;

  private:
    std::mt19937 seeds{1};
};

// The same in every run.
Tensor numbers(unsigned seed, at::IntArrayRef shape);

} // namespace hazard
