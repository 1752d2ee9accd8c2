// SPDX-License-Identifier: BSD-3-Clause
// collect.cpp: what an update on a GPU needs beside its tensors: loaded kernels, a
// stream and a step counter that may be on the device.
#include <c10/core/DeviceGuard.h>

#include "base/compat.h"
#include "base/device.h"
#include "gpu/collect.h"
#include "memory/memory.h"
#include "plan/plan.h"
#include "plan/references.h"
#include "plan/refuse.h"
#include "plan/scalars.h"

namespace optfuse {

bool load_kernels(const CudaLibrary *library, const char *rule, const c10::Device &where,
                  of_dtype dtype, const double *hyper) {
    of_gpu_update update = {};
    update.rule = rule;
    update.dtype = dtype;
    update.device = where.index();
    update.hyper = hyper;
    const c10::DeviceGuard device(where);
    library->relax(true); // a graph may be being captured
    const bool loaded = library->prepare(&update) == OF_CUDA_OK;
    library->relax(false);
    return loaded;
}

// Loading may have to wait for the device, which a launch must never do.
of_found prepare_gpu(Slot *slot, const c10::TensorImpl *p, of_dtype dtype, bool mixed) {
    Plan *plan = slot->plan;
    std::atomic<uint64_t> *const prepared = mixed ? plan->prepared_mixed : plan->prepared;
    const double *hyper = of_plan_hyper(plan->core, slot->index);
    double first[OF_MAX_HYPER] = {}; // scalars of a first update: all use the same kernels
    const auto ordinal = static_cast<size_t>(p->device().index());
    constexpr unsigned sets = 1U << OF_FORMULA_STATE; // of used state; that of programs is the last
    static_assert(OF_DTYPE_COUNT * sets <= 64, "a bit for each set of state of each dtype");
    const unsigned used = of_plan_state_used(plan->core, slot->index) & (sets - 1);
    const uint64_t bit = UINT64_C(1) << (static_cast<unsigned>(dtype) * sets + used);
    if (ordinal < 64 && (prepared[ordinal].load(std::memory_order_relaxed) & bit) != 0)
        return OF_FOUND_INPUTS;
    const CudaLibrary *library = cuda_library();
    if (library == nullptr)
        return refuse(slot, "", "is on a GPU, but ", of_error_message());
    if (plan->rule->prepare_gpu != nullptr) {
        of_count count = {};
        count.step = 1;
        plan->rule->prepare_gpu(hyper, &count, first);
        hyper = first;
    }
    const char *kernels = mixed ? of_rule_mixed(plan->rule) : plan->rule->name;
    if (!load_kernels(library, kernels, p->device(), dtype, hyper))
        return refuse(slot, "", "is on a GPU, but ", library->error());
    if (ordinal < 64)
        prepared[ordinal].fetch_or(bit, std::memory_order_relaxed);
    return OF_FOUND_INPUTS;
}

bool prepare_scaling(Plan *plan, const c10::Device &device, of_dtype dtype) {
    static const double none[OF_MAX_HYPER] = {};
    const auto ordinal = static_cast<size_t>(device.index());
    const uint32_t bit = UINT32_C(1) << static_cast<unsigned>(dtype);
    if (ordinal >= 64)
        return false;
    if ((plan->prepared_scaling[ordinal].load(std::memory_order_relaxed) & bit) != 0)
        return true;
    const CudaLibrary *library = cuda_library();
    if (library == nullptr || !load_kernels(library, "scaling", device, dtype, none))
        return false;
    plan->prepared_scaling[ordinal].fetch_or(bit, std::memory_order_relaxed);
    return true;
}

namespace {

// Checks the counters of rules whose scalars the host prepares, and of those whose counters are on
// the GPU.
of_found check_counting(const Slot *slot, const of_inputs *in) {
    const of_rule *rule = slot->plan->rule;
    if (rule->runs_programs && in->stream.capture != 0)
        return refuse(slot, "the update of ", "can't be captured into a CUDA graph",
                      ": replays would repeat the numbers of one step");
    if (rule->counts_on_gpu && in->stream.capture != 0)
        return refuse(slot, "the update of ", "can't be captured into a CUDA graph",
                      ", as in torch.optim without capturable=True");
    if (rule->prepare_gpu != nullptr && !rule->counts_on_gpu && step_is_on_gpu(slot))
        return refuse(slot, "the step counter of ", "is on the GPU",
                      ", where this update does not look for it: move state['step'] to the CPU, as "
                      "torch.optim has it without capturable=True");
    return OF_FOUND_INPUTS;
}

} // namespace

of_found collect_gpu(Slot *slot, const c10::TensorImpl *p, of_inputs *in, References *refs) {
    Plan *plan = slot->plan;
    if (!is_gpu(p->device()))
        return !plan->scalars->scale_gradients()
                   ? OF_FOUND_INPUTS
                   : refuse(slot, "", "is on the CPU, but others on a GPU were updated in backward",
                            " with the grad_scale or found_inf that was set, which the CPU's "
                            "updates obey with mode=\"forward\" only");
    in->device = OF_CUDA;
    in->ready = current_stream(p->device().index());
    in->stream = in->ready;
    if (plan->beside && refs->consumes)
        in->stream.id = side_stream(in->ready.device);
    refs->on_gpu.emplace(OnGpu{in->stream, in->ready, {}});
    if (check_counting(slot, in) == OF_FOUND_ERROR)
        return OF_FOUND_ERROR;
    plan->scalars->give(slot->group, in, refs);
    if (in->stream.capture != 0 && slot->step.defined() && !step_is_on_gpu(slot))
        return refuse(slot, "the step counter of ", "is on the CPU",
                      ", where the replays of the CUDA graph that is being captured can't count "
                      "it: build the optimizer with capturable=True");
    return OF_FOUND_INPUTS;
}

} // namespace optfuse
