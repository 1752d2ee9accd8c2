// SPDX-License-Identifier: BSD-3-Clause
// kinds.h: the kinds of absent numbers (memory/absent.h) that this folder knows.
#pragma once

#include "memory/absent.h"

namespace optfuse::absent {

// .grad in backward mode after the update; its DTensor (consumed.h).
extern const Absent consumed, wrapped;
// A gradient that is being reduced between processes (awaited.h).
extern const Absent awaited;
// recomputed.cpp: a parameter that is updated already where stock would still have the old numbers.
extern const Absent recomputed;

} // namespace optfuse::absent
