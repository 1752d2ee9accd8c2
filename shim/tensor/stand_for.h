// SPDX-License-Identifier: BSD-3-Clause
// stand_for.h: tensors that are not the memory of a pending update, and yet have to launch it
// when they are used: a DTensor for its local tensor, and a gradient whose memory many share.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <vector>

namespace optfuse {

using Stands = std::vector<const c10::TensorImpl *>;

// From here on each of these tensors stands for the update that has this key.
void stand_for(const c10::StorageImpl *key, const Stands &tensors);
// They no longer do, unless they stand for another one by now.
void stand_no_more(const c10::StorageImpl *key, const Stands &tensors);
// The key of the update that a tensor stands for, or nullptr. The tensor may be another one
// than the one that was told, at the same address.
const c10::StorageImpl *stands_for(const c10::TensorImpl *tensor);

} // namespace optfuse
