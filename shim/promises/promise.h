// SPDX-License-Identifier: BSD-3-Clause
// promise.h: a gradient that nobody has computed. Its tensor has shape, dtype and strides, and a
// storage without memory that keeps the product's factors in its place. All aliases have the same
// storage. Any look, by the mark on the tensor, has the product computed into memory; an update
// that finds it unmade computes it panel by panel, and nobody ever has all of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "memory/absent.h"
#include "optfuse.h"
#include "promises/product.h"

namespace optfuse {

class PromisingLayer;

at::Tensor make_promise(SharedProduct product, std::shared_ptr<PromisingLayer> layer);
void free_promise(void *promise); // the deleter of one
bool is_promise(const c10::TensorImpl *impl);
// Whether the tensor is all of a promise, laid out as the update computes it, and no view that turns
// it: what is answered for a storage below is answered for such a tensor.
bool is_as_promised(const c10::TensorImpl *impl);
// The promise of the same gradient in this dtype; undefined: it has to be computed.
at::Tensor cast_promise(const c10::StorageImpl *storage, at::ScalarType dtype);
// The promise of a sum, as autograd adds up what several uses of a weight contribute; undefined: it
// has to be computed.
at::Tensor sum_of_promises(const c10::StorageImpl *a, const c10::StorageImpl *b);
// From here on the first is a promise of the sum. False: it has to be computed, or has been.
bool add_promise(c10::StorageImpl *to, const c10::StorageImpl *other);
void keep_all_promises();
// Around fork(), with the core's locks held: a child has none of the threads that could let go of
// these.
void lock_promises();
void unlock_promises();

extern const of_product_host product_host;

// Absent's functions.
bool keep_promise(c10::StorageImpl *storage);
bool update_by_panels(const c10::StorageImpl *storage, of_inputs *in);
std::shared_ptr<const Computable> numbers_of_promise(const c10::TensorImpl *impl);

namespace absent {
// operators.cpp: promises; and dY, of which a node asks for one.
extern const Absent promised, asked;
} // namespace absent

} // namespace optfuse
