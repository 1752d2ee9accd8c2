// SPDX-License-Identifier: BSD-3-Clause
// forms.h: which forms an operator's results have, before it runs: by a rule for elementwise ones on
// operands of one form, else as they were when operands had these forms. So no line can fail by the
// forms of its operands.
#pragma once

#include <ATen/core/stack.h>

#include <optional>
#include <vector>

#include "recorded/tape.h"

namespace optfuse::recorded {

// By the rule: the results of a line, none of one that writes. No value: the rule does not know it.
std::optional<std::vector<c10::IValue>> forms_by_rule(Tape *tape, const Known &k,
                                                      const c10::IValue *args);

// A call as it was once, by all that its results' forms depend on.
class Learned {
  public:
    // False: it depends on what can't be told. The next three are of the call that was looked up.
    static bool look_up(const Known &k, const c10::IValue *args);
    static bool is_known();
    static bool is_line(); // false: it has to run at once
    static bool counts();  // whether what it writes gets new versions
    static std::vector<c10::IValue> results(Tape *tape);
    // It has been run. args, results: of it.
    static void learn(const Known &k, const std::vector<c10::IValue> &args,
                      const c10::IValue *results, size_t n_results, bool counts);
};

} // namespace optfuse::recorded
