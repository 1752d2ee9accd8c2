// SPDX-License-Identifier: BSD-3-Clause
// slots.h: what the owner of an optimizer says of its parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace optfuse {

// For a plan whose groups are set. tried: see Slot; label: how errors name the parameter.
void add_slot(Plan &plan, const at::Tensor &param, size_t group, bool eager, int64_t tried,
              std::string label);
// Another thread may let go of an optimizer, and so of its slots: their plans live as long as this.
struct FoundSlots {
    struct Found {
        Plan *plan; // null: of a parameter of no fused optimizer
        c10::TensorImpl *param; // which the caller keeps
        size_t index;
    };
    std::vector<Found> slots;
    std::vector<std::shared_ptr<Plan>> plans;
};
// The slots of those parameters that have a gradient, in this order. False: they are of no fused
// optimizer, or one is of an optimizer in backward mode, or of one whose gradients clipping must not
// leave to the update.
bool find_slots(const std::vector<at::Tensor> &params, FoundSlots *found);
// A slot that has taken the place of one for the same parameter, which had this of_shim_used().
void set_used(Slot &slot, uint64_t used);
// Around fork(): a child has none of the threads that could let go of the lock.
void lock_slots();
void unlock_slots();
// state: the rule's state tensors in its order, then its counters; none where there is none.
// step: the counter. first: the rule has no counter and this state is new.
void set_state(Slot &slot, const std::vector<std::optional<at::Tensor>> &state,
               const std::optional<at::Tensor> &step, bool first);
// Whether others hold a tensor of the state beside the slot and the owner's entry: another optimizer
// that was given it, or another slot.
bool shares_state(const Slot &slot);
// 0 for an inference tensor, which has none.
inline uint64_t version_of(const c10::TensorImpl *impl) {
    const c10::VariableVersion &version = impl->version_counter();
    return version.enabled() ? version.current_version() : 0;
}
// The sums of the versions of what stands for the parameter, and for its state: each write that
// PyTorch sees makes one larger. Of a DTensor the writes are the wrapper's.
uint64_t param_version(const Slot &slot);
uint64_t state_version(const Slot &slot);
// Backward mode: whether there is a gradient that backward has not used.
bool has_unused_gradient(const Plan &plan);
// Whoever writes to the parameter or its state from here on has written since the update.
void note_versions(Slot &slot);
// .grad of every slot's parameter is None afterwards. With the GIL, if Python is there: what dies may
// have finalizers.
void drop_gradients(Plan &plan);

} // namespace optfuse
