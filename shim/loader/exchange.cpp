// SPDX-License-Identifier: BSD-3-Clause
// exchange.cpp: the operator by which tensors change places with others of the same sizes, strides and
// dtype.
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include "base/error.h"
#include "guard.h"
#include "memory/memory.h"

namespace optfuse {
namespace {

// All of its memory, which nobody else knows.
bool has_own_memory(const at::Tensor &t) {
    c10::StorageImpl *memory = storage_of(t.unsafeGetTensorImpl());
    return t.is_cpu() && t.storage_offset() == 0 && memory->nbytes() == t.nbytes() &&
           absent_of(memory) == nullptr && (is_private(memory, 0) || !OF_GUARD(exchange));
}

void exchange_memory(const at::Tensor &a, const at::Tensor &b) {
    c10::StorageImpl *from = storage_of(b.unsafeGetTensorImpl());
    from->set_data_ptr_noswap(storage_of(a.unsafeGetTensorImpl())
                                  ->set_data_ptr(std::move(from->_mutable_data_ptr_no_checks())));
    a.unsafeGetTensorImpl()->bump_version();
    b.unsafeGetTensorImpl()->bump_version();
}

void exchange_values(const at::Tensor &a, const at::Tensor &b) {
    const at::Tensor kept = a.clone();
    a.copy_(b);
    b.copy_(kept);
}

// a[i] gets the values of b[i], and b[i] those of a[i]; both versions go up. Nothing is copied
// where PyTorch allocated both memories on the CPU and nobody else knows them: then the
// tensors exchange their memories. in_place[i] != 0: never that of a[i], whose address somebody
// has.
void exchange_all(const std::vector<at::Tensor> &a, const std::vector<at::Tensor> &b,
                  const std::vector<int64_t> &in_place) {
    const at::NoGradGuard values_only;
    for (size_t i = 0; i < a.size(); i++) {
        if (a[i].sizes() != b[i].sizes() || a[i].dtype() != b[i].dtype())
            fail("optfuse: tensors that change places differ in size or dtype");
        if (in_place[i] == 0 && a[i].strides() == b[i].strides() && has_own_memory(a[i]) &&
            has_own_memory(b[i]))
            exchange_memory(a[i], b[i]);
        else
            exchange_values(a[i], b[i]);
    }
}

} // namespace
} // namespace optfuse

TORCH_LIBRARY_FRAGMENT(optfuse, m) {
    m.def("exchange(Tensor(a!)[] a, Tensor(b!)[] b, int[] in_place) -> ()", optfuse::exchange_all);
}
