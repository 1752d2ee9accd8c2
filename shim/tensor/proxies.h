// SPDX-License-Identifier: BSD-3-Clause
// proxies.h: tensors that are not the memory of a pending update, and yet have to launch it
// when they are used: a DTensor for its local tensor, and a gradient whose memory many share.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <vector>

namespace optfuse {

using Proxies = std::vector<const c10::TensorImpl *>;

// From here on each of these tensors stands for the update that has this key.
void add_proxies(const c10::StorageImpl *key, const Proxies &tensors);
// They no longer do, unless they stand for another one by now.
void remove_proxies(const c10::StorageImpl *key, const Proxies &tensors);
// The key of the update that a tensor stands for, or nullptr. The tensor may be another one
// than the one that was told, at the same address.
const c10::StorageImpl *key_of_proxy(const c10::TensorImpl *tensor);

} // namespace optfuse
