// SPDX-License-Identifier: BSD-3-Clause
// instead.h: what .grad of an optimizer's parameters is in its step(), where not all gradients are there
// (ahead.h), or where step() runs on one parameter (shim.h, of_shim_step_alone()).
#pragma once

#include <c10/util/flat_hash_map.h>

#include <cstdint>

#include "python/interpreter.h"

namespace optfuse::recorded {

struct Instead {
    ska::flat_hash_map<const of_object *, of_object *> gradients;
    of_object *dropped = nullptr; // a list of parameters whose .grad step() has set to None; or null
    int64_t n_looks = 0; // at parameters without a gradient
};

} // namespace optfuse::recorded
