// SPDX-License-Identifier: BSD-3-Clause
// proxies.h: what is not the memory of a pending update, and yet has to launch it when it is used: a
// DTensor for its local tensor, and memory that many gradients share.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <vector>

namespace optfuse {

using Proxies = std::vector<const void *>; // tensors, or storages for all tensors that have them

// From here on each of these stands for the update that has this key. A storage may stand for many.
void add_proxies(const c10::StorageImpl *key, const Proxies &proxies);
// They no longer do.
void remove_proxies(const c10::StorageImpl *key, const Proxies &proxies);
// The keys of the updates that a tensor or its storage stands for. It may be another one than the one
// that was told, at the same address.
std::vector<const c10::StorageImpl *> keys_of_proxy(const c10::TensorImpl *tensor);

} // namespace optfuse
