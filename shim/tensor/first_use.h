// SPDX-License-Identifier: BSD-3-Clause
// first_use.h: the fallback that launches a pending update when its tensors are used, and
// which threads use them.
#pragma once

namespace optfuse {

struct Plan;

int register_first_use();
bool called_by_engine();
bool called_by_stranger(); // neither a thread that steps nor one of the engine's
void note_stepping_thread();

// Whether this is a moment when marks may be taken off other tensors than the one that is used.
bool may_take_marks_off(const Plan *plan);

} // namespace optfuse
