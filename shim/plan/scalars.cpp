// SPDX-License-Identifier: BSD-3-Clause
// scalars.cpp: copies of the scalars that are on a GPU, each made once a step.
#include "plan/scalars.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/device.h"
#include "base/plain_mode.h"
#include "memory/memory.h"
#include "plan/references.h"

namespace optfuse {

void DeviceScalars::set(std::vector<at::Tensor> rates, at::Tensor scale, at::Tensor inf) {
    std::vector<Copy> dropped; // after the lock, as what the arguments get
    const std::lock_guard<std::mutex> guard(lock);
    lr.swap(rates);
    std::swap(grad_scale, scale);
    std::swap(found_inf, inf);
    copies.swap(dropped);
    divides = grad_scale.defined();
    scales = divides || found_inf.defined();
    any = scales || std::any_of(lr.begin(), lr.end(), [](const auto &r) { return r.defined(); });
}

// On the current stream, which is the one where the inputs are ready: nothing else
// would order a copy made on another.
const float *DeviceScalars::copy_of(const at::Tensor &scalar, const of_stream &stream,
                                    at::Tensor *keep) {
    if (!scalar.defined())
        return nullptr;
    for (const Copy &known : copies)
        if (known.of == scalar.unsafeGetTensorImpl() && known.stream.device == stream.device &&
            known.stream.id == stream.id)
            *keep = known.copy;
    if (!keep->defined()) {
        const PlainMode plain;
        const c10::Device device(gpu_type(), static_cast<c10::DeviceIndex>(stream.device));
        *keep = at::empty({}, at::TensorOptions().device(device).dtype(at::kFloat));
        keep->copy_(scalar.reshape({}), /*non_blocking=*/true);
        copies.push_back({scalar.unsafeGetTensorImpl(), stream, *keep});
    }
    return static_cast<const float *>(data_of(keep->unsafeGetTensorImpl()));
}

void DeviceScalars::give(size_t group, of_inputs *in, References *refs) {
    if (!any)
        return;
    const std::lock_guard<std::mutex> guard(lock);
    if (group < lr.size())
        in->lr_at = copy_of(lr[group], in->ready, &refs->on_gpu->scalars[0]);
    in->grad_scale_at = copy_of(grad_scale, in->ready, &refs->on_gpu->scalars[1]);
    in->found_inf_at = copy_of(found_inf, in->ready, &refs->on_gpu->scalars[2]);
}

void DeviceScalars::set_factor(at::Tensor by) {
    std::vector<std::pair<of_stream, at::Tensor>> dropped; // after the lock
    const std::lock_guard<std::mutex> guard(lock);
    std::swap(factor, by);
    factors.swap(dropped);
}

bool DeviceScalars::has_factor(at::ScalarType dtype) {
    const std::lock_guard<std::mutex> guard(lock);
    return factor.defined() && factor.scalar_type() == dtype;
}

void DeviceScalars::give_factor(of_inputs *in, References *refs) {
    const std::lock_guard<std::mutex> guard(lock);
    at::Tensor &keep = refs->on_gpu->scalars[FACTOR];
    for (const auto &[stream, known] : factors)
        if (stream.device == in->stream.device && stream.id == in->stream.id)
            keep = known;
    if (!keep.defined()) {
        const PlainMode plain;
        const c10::Device device(gpu_type(), static_cast<c10::DeviceIndex>(in->stream.device));
        const auto type = factor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
        keep = factor.reshape({}).to(device, type, /*non_blocking=*/true);
        factors.emplace_back(in->stream, keep);
    }
    in->factor_at = data_of(keep.unsafeGetTensorImpl());
}

} // namespace optfuse
