// SPDX-License-Identifier: BSD-3-Clause
// owners.h: which parameter each line of a step() belongs to: that whose memory, or whose gradient's, it
// has to do with, by whatever lines are between. What lines only read has no owner.
#pragma once

#include <string>
#include <vector>

#include "recorded/tape.h"

namespace optfuse::recorded {

struct Part;

// A storage that belongs to a parameter from the start.
struct Anchor {
    const c10::StorageImpl *storage;
    size_t slot;
    bool is_gradient;
};

// Lines of lists become lines of their places. parts: by slot; they get the lines. Null: nothing is
// shared out. Returns why it can't be, or nothing.
std::string share_out(const std::vector<Line> &lines, const std::vector<c10::IValue> &values,
                      const std::vector<Anchor> &anchors, std::vector<Part> *parts);

} // namespace optfuse::recorded
