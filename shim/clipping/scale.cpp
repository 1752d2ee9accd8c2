// SPDX-License-Identifier: BSD-3-Clause
// scale.cpp: gradients that clipping or unscaling multiplies: large ones when they are next
// read, and not before.
#include <ATen/ops/_foreach_mul.h>

#include <array>
#include <atomic>
#include <limits>
#include <map>
#include <optional>

#include "absent/awaited.h"
#include "absent/consumed.h"
#include "base/compat.h"
#include "base/error.h"
#include "base/threads.h"
#include "clipping/pending.h"
#include "floating.h"
#include "gpu/collect.h"
#include "guard.h"
#include "host/first_use.h"
#include "host/host.h"
#include "memory/memory.h"
#include "memory/written.h"
#include "plan/plan.h"
#include "plan/references.h"
#include "plan/refuse.h"
#include "plan/scalars.h"
#include "scale.h"

namespace optfuse {

bool can_scale(const at::Tensor &grad, of_dtype *dtype) {
    if (!grad.defined())
        return false;
    c10::TensorImpl *g = grad.unsafeGetTensorImpl();
    return g->layout() == c10::kStrided && g->has_storage() &&
           !g->key_set().has(c10::DispatchKey::Python) && dtype_of(g, dtype) && !is_lazy(g) &&
           !is_consumed(g) && g->is_non_overlapping_and_dense() && !g->requires_grad() &&
           !g->is_inference() && g->numel() != 0;
}

namespace {

// A record of what waits takes as long as to multiply so many numbers in the cache.
std::atomic<int64_t> waits_from{16384};

// Gradients whose memory others see, or that copy on write, are left to PyTorch's operator, which
// takes many at once. In a capture the wait ends with it at the latest: what is pending then is
// launched into the graph.
bool can_wait_on_gpu(const Slot *slot, const c10::TensorImpl *g, of_dtype dtype) {
    Plan *plan = slot->plan;
    return is_gpu(g->device()) && plan->mode == OF_FORWARD &&
           plan->scalars->has_factor(g->dtype().toScalarType()) && is_private(storage_of(g), 0) &&
           prepare_scaling(plan, g->device(), dtype);
}

void place_scaling(const c10::TensorImpl *g, of_inputs *in, References *refs) {
    in->device = OF_CUDA;
    in->grad = in->param;
    in->ready = in->stream = current_stream(g->device().index());
    refs->on_gpu.emplace(OnGpu{in->stream, in->ready, {}});
    refs->slot->plan->scalars->give_factor(in, refs);
}

// The parameter that this thread has looked up. Another one may put another in its slot meanwhile.
thread_local const c10::TensorImpl *looked_up = nullptr;

of_found find_gradient(Slot *slot, of_inputs *in) {
    const at::Tensor &grad = slot->param->grad();
    if (slot->param != looked_up || !can_scale(grad, &in->dtype))
        return OF_FOUND_NOTHING;
    c10::TensorImpl *g = grad.unsafeGetTensorImpl();
    c10::StorageImpl *storage = storage_of(g);
    compute_now(g);
    launch_others(g, of_launch_at);
    if (!g->device().is_cpu() && !can_wait_on_gpu(slot, g, in->dtype))
        return OF_FOUND_NOTHING;
    References *refs = new (in->references) References;
    refs->slot = slot;
    refs->tensors[0] = g;
    refs->storages[0] = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
    in->keys[0] = storage;
    in->n_keys = refs->n = 1;
    in->param = written_data_of(g);
    in->numel = g->numel();
    if (g->device().is_cpu())
        return OF_FOUND_INPUTS;
    try {
        place_scaling(g, in, refs);
    } catch (...) {
        refs->~References();
        throw;
    }
    return OF_FOUND_INPUTS;
}

of_found collect_gradient(void *, void *tensor, of_inputs *in) {
    Slot *slot = static_cast<Slot *>(tensor);
    return attempt("clipping the gradient of ", slot->label, OF_FOUND_ERROR,
                   [&] { return find_gradient(slot, in); });
}

void share_factor(void *, void *to, const void *from) {
    static_cast<References *>(to)->on_gpu->scalars[FACTOR] =
        static_cast<const References *>(from)->on_gpu->scalars[FACTOR];
}

// From here on the references hold the gradient's memory weakly.
bool defer_scaling(void *, void *opaque) {
    auto *refs = static_cast<References *>(opaque);
    c10::StorageImpl *storage = refs->storages[0].get();
    if (OF_GUARD(privacy) && !is_private(storage, 1))
        return false;
    if (OF_GUARD(key))
        mark(refs->tensors[0]);
    if (OF_GUARD(seal))
        seal(storage);
    refs->gradient = c10::weak_intrusive_ptr<c10::StorageImpl>(refs->storages[0]);
    refs->storages[0].reset();
    return true;
}

bool is_alive(void *, void *opaque) {
    return !static_cast<References *>(opaque)->gradient.expired();
}

bool keep(void *, void *opaque) {
    References *refs = static_cast<References *>(opaque);
    refs->storages[0] = refs->gradient.lock();
    return static_cast<bool>(refs->storages[0]);
}

void unseal_scaled(void *, void *opaque) {
    const auto *refs = static_cast<References *>(opaque);
    if (refs->storages[0])
        unseal(refs->storages[0].get());
}

// The owner of the memory does not know of a launch that comes late.
void record_gradient(const References &refs) {
    const of_stream &stream = refs.on_gpu->stream;
    if (refs.storages[0]) // else nobody has it any more
        record_on_stream(refs.storages[0].get(), stream);
    for (const at::Tensor &scalar : refs.on_gpu->scalars)
        if (scalar.defined())
            record_on_stream(storage_of(scalar.unsafeGetTensorImpl()), stream);
}

void settle_scaling(void *, void *opaque, bool was_deferred) {
    auto *refs = static_cast<References *>(opaque);
    if (was_deferred)
        unseal_scaled(nullptr, opaque);
    if (was_deferred && refs->on_gpu)
        record_gradient(*refs);
}

using Kernels = std::array<of_scale_fn *, OF_DTYPE_COUNT>;

Kernels find_kernels() {
    Kernels found;
    for (size_t dtype = 0; dtype < found.size(); dtype++)
        found[dtype] = of_scale_find(static_cast<of_dtype>(dtype), of_isa_detect());
    return found;
}

of_scale_fn *kernel_of(of_dtype dtype) {
    static const Kernels kernels = find_kernels();
    return kernels[dtype];
}

// False: it is not small, not on the CPU, or has another factor that waits.
bool scale_now(const GradientOf &of, double number) {
    of_dtype dtype;
    const at::Tensor &grad = of.grad();
    if (!can_scale(grad, &dtype) || !grad.device().is_cpu() || grad.numel() >= waits_from)
        return false;
    c10::TensorImpl *g = grad.unsafeGetTensorImpl();
    compute_now(g);
    launch_others(g, of_launch_at);
    if (of_is_scaled(storage_of(g)))
        return false;
    const double factors[OF_MAX_FACTORS] = {number, 1.0};
    void *numbers = written_data_of(g);
    kernel_of(dtype)(numbers, numbers, static_cast<size_t>(g->numel()), factors);
    g->bump_version();
    return true;
}

// False: the gradient can't be left pending.
bool scale_later(const GradientOf &of, double number, float norm) {
    bool scaled = false;
    if (of.plan == nullptr)
        return false;
    note_stepping_thread(); // in the first iteration before any step()
    looked_up = of.param;
    const of_status status = of_plan_scale(of.plan->core, of.slot, number, norm, &scaled);
    if (status == OF_INVALID || (of.plan->closed.load(std::memory_order_acquire) && !scaled))
        return false; // another thread has let go of the optimizer, or changes its groups
    if (status != OF_OK)
        fail(std::string("optfuse: ") + of_error_message());
    if (scaled)
        of.grad().unsafeGetTensorImpl()->bump_version();
    return scaled;
}

using Alike = std::map<std::pair<c10::DeviceIndex, at::ScalarType>, std::vector<at::Tensor>>;

void set_factors(const std::vector<GradientOf> &of, const at::Tensor &factor) {
    const Plan *last = nullptr;
    for (const GradientOf &g : of)
        if (g.plan != last && g.plan != nullptr)
            (last = g.plan, g.plan->scalars->set_factor(factor));
}

// PyTorch multiplies two tensors without dimensions in the wider dtype; a factor beside a gradient
// with dimensions is rounded as docs/numerics.md says.
bool multiplies_wide(const at::Tensor &grad, const at::Tensor &factor) {
    return grad.defined() && grad.dim() == 0 && grad.scalar_type() != at::kDouble &&
           factor.scalar_type() == at::kDouble &&
           !factor.unsafeGetTensorImpl()->is_wrapped_number();
}

bool scale_all_given(const std::vector<GradientOf> &of, const at::Tensor &factor) {
    constexpr float unknown = std::numeric_limits<float>::quiet_NaN();
    std::optional<double> number; // asked for if a gradient of the CPU needs it
    bool some_wait = false;
    Alike now;
    for (const GradientOf &g : of) {
        const at::Tensor &grad = g.grad();
        if (multiplies_wide(grad, factor)) {
            grad.mul_(factor);
        } else if (!grad.defined() || !is_gpu(grad.device())) {
            if (!number)
                number = factor.item<double>();
            of_dtype dtype;
            const bool changes = *number != 1 || of_floating_now() != 0; // denormals become zeros
            if (changes || !can_scale(grad, &dtype)) // PyTorch's operator may refuse it
                some_wait |= scale_one(g, *number, unknown, factor);
            else
                grad.unsafeGetTensorImpl()->bump_version();
        } else if (scale_later(g, 1, unknown)) {
            some_wait = true;
        } else if (grad.layout() != at::kStrided || is_lazy(grad.unsafeGetTensorImpl())) {
            grad.mul_(factor.to(grad.device()));
        } else {
            now[{grad.device().index(), grad.scalar_type()}].push_back(grad);
        }
    }
    for (auto &[where, grads] : now)
        at::_foreach_mul_(grads, factor.to(grads[0].device()));
    return some_wait;
}

void sweep(const std::vector<GradientOf> &of) {
    const Plan *last = nullptr;
    for (const GradientOf &g : of)
        if (g.plan != last && g.plan != nullptr)
            of_plan_sweep((last = g.plan)->core);
}

void await_gradient(const at::Tensor &grad) {
    const c10::TensorImpl *g = grad.unsafeGetTensorImpl();
    if (grad.defined() && g->has_storage() && !await_arrival(storage_of(g)))
        fail(std::string("optfuse: ") + of_error_message());
}

} // namespace

const of_scaling_host scaling_host = {sizeof(of_scaling_host),
                                      collect_gradient,
                                      defer_scaling,
                                      settle_scaling,
                                      unseal_scaled,
                                      is_alive,
                                      keep,
                                      share_factor};

int64_t wait_from(int64_t numel) {
    return waits_from.exchange(numel);
}

void make_ready(const std::vector<GradientOf> &of) {
    for (const GradientOf &g : of) {
        await_gradient(g.grad());
        if (g.grad().defined() && g.grad().device().is_cpu())
            set_threads_as_operators(g.grad().numel());
        // An update that writes to the gradient: by an optimizer's own code, by a program, or of
        // another parameter that has the same memory.
        if (g.grad().defined())
            launch_others(g.grad().unsafeGetTensorImpl(), of_launch_at);
    }
    sweep(of);
}

bool scale_one(const GradientOf &of, double number, float norm, const at::Tensor &factor) {
    if (scale_now(of, number))
        return false;
    if (scale_later(of, number, norm))
        return true;
    if (of.grad().defined())
        of.grad().mul_(factor);
    return false;
}

bool scale_all(const std::vector<GradientOf> &of, const at::Tensor &factor) {
    set_factors(of, factor);
    try {
        const bool some_wait = scale_all_given(of, factor);
        set_factors(of, {});
        return some_wait;
    } catch (...) {
        set_factors(of, {});
        throw;
    }
}

} // namespace optfuse
