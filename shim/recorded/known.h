// SPDX-License-Identifier: BSD-3-Clause
// known.h: what is known of an operator before it has run: whether a step() that is recorded writes
// it down (record.h), and of elementwise ones what they compute.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <bitset>
#include <string>
#include <vector>

namespace optfuse::recorded {

enum class Way : uint8_t {
    THROUGH, // its own operators are looked at
    VIEW,    // numbers are not touched
    AT_ONCE, // may fail by values, its results' forms depend on them, or it is not known
    LOOK,    // what comes next reads the memory past the dispatcher
    DRAW,    // takes random numbers
    WRITE,   // a line that gives back arguments which it has written
    MAKE     // a line that gives new tensors
};

using Arguments = std::bitset<64>; // no operator of PyTorch has more

struct Known {
    Way way = Way::AT_ONCE;
    bool is_ours = false;     // of the namespace "optfuse"
    bool reads_all = false;   // it may read and write memory that is none of its arguments'
    bool fits = false;        // its arguments have forms with which it works
    bool makes_blank = false; // its results have no numbers yet, or random ones
    bool of_lists = false;    // one operator for each place of its lists
    bool elementwise = false; // its results' forms are known (forms.h)
    bool compares = false;    // and they are booleans
    bool may_fuse = false;    // there may be instructions that do the same (translate.h)
    bool fills = false;       // with a number, or a tensor without dimensions
    bool has_out = false;     // its last argument is what it writes
    size_t n = 0;             // arguments
    size_t target = 0;        // of WRITE: the first argument that it writes
    std::string name;         // without "aten::", "_foreach_" and the "_" of one in place
    // By argument:
    Arguments number;  // its value says nothing of the results' forms
    Arguments tensor;  // it is a tensor, which may stand for a number
    Arguments classes; // for some numbers there is another instruction
    Arguments writes;
    std::vector<size_t> returned; // of WRITE: the argument that each result is
};

// Found once per operator; the same object for the life of the process.
const Known &known(const c10::OperatorHandle &op);

} // namespace optfuse::recorded
