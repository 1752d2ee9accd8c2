// SPDX-License-Identifier: BSD-3-Clause
// actions.h: what a program may do between two calls.
#pragma once

#include "hazard/world.h"

#include <array>
#include <vector>

namespace hazard {

using Numbers = std::array<unsigned, 4>; // each below 1000

struct Action {
    const char *name;
    unsigned weight; // how often it is drawn
    // Means something between backward() and step() in backward mode, where weights and state are
    // the new ones already.
    bool between;
    // Backward mode can run it to its end.
    bool gentle;
    void (*run)(World &world, const Numbers &n);
};

std::vector<Action> training_actions(); // the first is an iteration
std::vector<Action> changing_actions();
std::vector<Action> looking_actions();

} // namespace hazard
