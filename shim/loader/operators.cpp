// SPDX-License-Identifier: BSD-3-Clause
// operators.cpp: the operators through which Python hands over tensors. `plan` is
// the address of an of_shim_plan.
#include <torch/library.h>

#include "absent/awaited.h"
#include "absent/consumed.h"
#include "autograd/backward.h"
#include "autograd/dtensor_gradients.h"
#include "base/device.h"
#include "base/error.h"
#include "base/threads.h"
#include "cpu/draw_chunk.h"
#include "doors/gpu_trial.h"
#include "memory/memory.h"
#include "plan/arguments.h"
#include "plan/plan.h"
#include "plan/references.h"
#include "plan/scalars.h"
#include "plan/slots.h"
#include "promises/layer.h"
#include "python/gil.h"

namespace optfuse {
namespace {

// For a plan without slots whose groups are set. One entry a parameter in each
// list; used: of_shim_used() before; tried: see Slot, and for tried_on_cpu Plan;
// label: how errors name the parameter.
void set_slots(int64_t address, const std::vector<at::Tensor> &params,
               const std::vector<int64_t> &groups, const std::vector<int64_t> &eager,
               const std::vector<int64_t> &used, const std::vector<int64_t> &tried,
               int64_t tried_on_cpu, const std::vector<std::string> &labels) {
    refuse_fake_tensors("parameters are told");
    Plan &plan = plan_at(address);
    plan.tried_on_cpu = tried_on_cpu;
    for (size_t i = 0; i < params.size(); i++) {
        add_slot(plan, params[i], static_cast<size_t>(groups[i]), eager[i] != 0, tried[i],
                 labels[i]);
        let_promise(plan, plan.slots[i]);
        if (used[i] != 0)
            set_used(*plan.slots[i], static_cast<uint64_t>(used[i]));
        note_versions(*plan.slots[i]);
    }
}

// See slots.h.
void tell_state(int64_t address, int64_t index, const std::vector<std::optional<at::Tensor>> &state,
                const std::optional<at::Tensor> &step, bool first) {
    refuse_fake_tensors("optimizer state is told");
    set_state(slot_at(plan_at(address), index), state, step, first);
}

// For the next step, or the backward pass that begins: scalars that are on a
// GPU. lr: one for each group, None where it is a number.
void set_device_scalars(int64_t address, const std::vector<std::optional<at::Tensor>> &lr,
                        const std::optional<at::Tensor> &grad_scale,
                        const std::optional<at::Tensor> &found_inf) {
    refuse_fake_tensors("learning rates are told");
    std::vector<at::Tensor> rates;
    for (const auto &rate : lr)
        rates.push_back(rate ? *rate : at::Tensor());
    plan_at(address).scalars->set(std::move(rates), grad_scale ? *grad_scale : at::Tensor(),
                                 found_inf ? *found_inf : at::Tensor());
}

void attach_all(int64_t address, const std::vector<at::Tensor> &params) {
    refuse_fake_tensors("gradient hooks are attached");
    attach(plan_at(address), params);
}

void detach(int64_t address, const std::vector<at::Tensor> &params) {
    for (const at::Tensor &param : params)
        detach_gradient_hook(&plan_at(address), param);
}

// From here to the next set_slots(): those whose gradients are reduced between processes.
void set_reduced(int64_t address, const std::vector<int64_t> &slots) {
    Plan &plan = plan_at(address);
    plan.reduces = !slots.empty();
    for (const int64_t slot : slots)
        slot_at(plan, slot).reduced = true;
}

bool take_parts_of(int64_t address, const std::vector<int64_t> &slots, const at::Tensor &bucket,
                   const std::vector<int64_t> &offsets) {
    refuse_fake_tensors("gradients are put into place");
    Plan &plan = plan_at(address);
    std::vector<Slot *> taking;
    for (const int64_t slot : slots)
        taking.push_back(&slot_at(plan, slot));
    const WithoutGil wait;
    return take_parts(plan.self, taking, bucket, offsets);
}

void give_parts(const std::vector<at::Tensor> &params, const at::Tensor &bucket,
                const std::vector<int64_t> &offsets) {
    for (size_t i = 0; i < params.size(); i++)
        give_part(params[i], bucket, offsets[i]);
}

// The gradients of these parameters, in elements of the bucket from `offsets` on, are what its
// reduction makes of them, and are waited for when they are used; group: of the model. Returns
// the numbers of those that can't wait. In a form that takes futures.
void expect_gradients(const c10::OperatorHandle &, torch::jit::Stack *stack) {
    refuse_fake_tensors("gradients are expected");
    const int64_t group = torch::jit::pop(*stack).toInt();
    const Reduction reduction = torch::jit::pop(*stack).toFuture();
    const std::vector<int64_t> offsets = torch::jit::pop(*stack).toIntVector();
    const at::Tensor buffer = torch::jit::pop(*stack).toTensor();
    const std::vector<at::Tensor> params = torch::jit::pop(*stack).toTensorVector();
    torch::jit::push(*stack, expect({params, buffer, offsets, reduction, group}));
}

void reduced(int64_t address, const std::vector<int64_t> &slots) {
    const std::shared_ptr<Plan> plan = plan_at(address).self;
    const at::Tensor param = reference_to(slot_at(*plan, slots.front()).param);
    const WithoutGil wait;
    gradients_are_complete(plan, {slots.begin(), slots.end()}, param);
}

std::vector<size_t> numbers_of(Plan &plan, const std::vector<int64_t> &slots) {
    std::vector<size_t> numbers;
    for (const int64_t slot : slots)
        numbers.push_back(slot_at(plan, slot).index);
    return numbers;
}

// Lends the local parameters of DTensors: see autograd/dtensor_gradients.h. The user has thrown away
// whatever gradient others have, a consumed one too.
void lend(int64_t address, const std::vector<int64_t> &slots,
          const std::vector<at::Tensor> &grads) {
    refuse_fake_tensors("gradients are told");
    Plan &plan = plan_at(address);
    for (const Slot *slot : plan.slots)
        if (!slot->wrappers.empty())
            slot->param->mutable_grad().reset();
    const std::vector<size_t> numbers = numbers_of(plan, slots);
    lend_gradients(plan, numbers, grads);
    if (plan.mode == OF_FORWARD)
        know_gradients(plan, numbers, grads);
}

// stepped: the writes of updates are the DTensors', too.
void take_back(int64_t address, bool stepped) {
    for (Slot *slot : plan_at(address).slots)
        if (!slot->wrappers.empty())
            take_gradient_back(*slot, stepped);
}

// Those that have been updated.
std::vector<int64_t> complete(int64_t address, const std::vector<int64_t> &slots,
                              const std::vector<at::Tensor> &grads,
                              const std::vector<at::Tensor> &siblings, bool only_kept) {
    refuse_fake_tensors("gradients are complete");
    Plan &plan = plan_at(address);
    complete_gradients(plan, numbers_of(plan, slots), grads, siblings, only_kept);
    std::vector<int64_t> updated;
    for (const int64_t slot : slots)
        if (of_plan_is_updated(plan.core, static_cast<size_t>(slot)))
            updated.push_back(slot);
    return updated;
}

// After the wrappers of these DTensors have got the versions of the updates.
void note_versions_of(int64_t address, const std::vector<int64_t> &slots) {
    for (const int64_t slot : slots)
        note_versions(slot_at(plan_at(address), slot));
}

void know_aliases(int64_t address, int64_t index, const std::vector<at::Tensor> &candidates) {
    set_aliases(slot_at(plan_at(address), index), candidates);
}

void know_wrappers(int64_t address, int64_t index, const std::vector<at::Tensor> &wrappers) {
    set_wrappers(slot_at(plan_at(address), index), wrappers);
}

at::Tensor consumed_like(int64_t address, const at::Tensor &local) {
    return make_consumed(local, plan_at(address).steps);
}

// The gradients of these DTensors are used up. Returns the slots that need consume_by().
std::vector<int64_t> consume_all(int64_t address, const std::vector<int64_t> &slots) {
    std::vector<int64_t> others;
    for (const int64_t slot : slots)
        if (!consume(slot_at(plan_at(address), slot)))
            others.push_back(slot);
    return others;
}

// wrapper: a DTensor of `local`, which is consumed.
void consume_by_wrapper(int64_t address, int64_t index, const at::Tensor &wrapper,
                        const at::Tensor &local) {
    consume_wrapper(wrapper, local);
    consume_by(slot_at(plan_at(address), index), wrapper);
}

c10::List<bool> are_consumed(const std::vector<at::Tensor> &gradients) {
    c10::List<bool> consumed;
    for (const at::Tensor &gradient : gradients)
        consumed.push_back(is_consumed(gradient.unsafeGetTensorImpl()));
    return consumed;
}

// See doors/gpu_trial.h.
bool bits_differ(const std::string &rule, const std::vector<double> &hyper, at::ScalarType dtype,
                 c10::Device device, const std::string &label, bool mixed) {
    return gpu_bits_differ(*of_rule_find(rule.c_str()), hyper,
                           at::TensorOptions(dtype).device(device), label, mixed);
}

// Seals the memory of these tensors: asking for its address raises. Returns the numbers of
// the tensors that were sealed. The trial of a class's step() must reach nothing real.
std::vector<int64_t> seal_all(const std::vector<at::Tensor> &tensors) {
    std::vector<int64_t> sealed;
    for (size_t i = 0; i < tensors.size(); i++) {
        const c10::TensorImpl *impl = tensors[i].unsafeGetTensorImpl();
        if (!impl->has_storage() || is_sealed(storage_of(impl)))
            continue;
        seal(storage_of(impl));
        sealed.push_back(static_cast<int64_t>(i));
    }
    return sealed;
}

void unseal_all(const std::vector<at::Tensor> &tensors) {
    for (const at::Tensor &tensor : tensors)
        unseal(storage_of(tensor.unsafeGetTensorImpl()));
}

// On the current stream. False: there is no library for GPUs.
bool draw_on_gpu(const at::Tensor &to, at::ScalarType dtype, int64_t seed, int64_t step,
                 int64_t parameter, int64_t stream, int64_t first) {
    const c10::Device where = to.device();
    const Relaxed relaxed; // the kernel may have to be loaded
    if (relaxed.library == nullptr)
        return false;
    const of_draw_key key =
        of_key_of_stream(static_cast<uint64_t>(seed), static_cast<uint32_t>(step),
                         static_cast<uint32_t>(parameter), static_cast<uint32_t>(stream));
    of_gpu_draws draws = {};
    draws.to = reinterpret_cast<uint32_t *>(to.mutable_data_ptr<int32_t>());
    draws.n = static_cast<uint64_t>(to.numel());
    draws.first = static_cast<uint64_t>(first);
    draws.seed = key.seed;
    draws.step = key.step;
    draws.parameter = key.parameter;
    draws.halves = dtype == at::kBFloat16 ? 2 : 1;
    const c10::DeviceGuard guard(where);
    void *const current = native_stream(current_stream(where.index()));
    if (relaxed.library->draw(&draws, where.index(), current) != OF_CUDA_OK)
        fail(std::string("optfuse: random integers on a GPU: ") + relaxed.library->error());
    return true;
}

// The integers of stochastic rounding (kernels/rules/draws.h) of as many elements as `to` has, an
// int32 tensor without holes, from `first` on, in the order of its memory.
void draw(const at::Tensor &to, at::ScalarType dtype, int64_t seed, int64_t step, int64_t parameter,
          int64_t stream, int64_t first) {
    if (is_gpu(to.device()) && draw_on_gpu(to, dtype, seed, step, parameter, stream, first))
        return;
    const at::Tensor here = to.is_cpu() ? to : at::empty_like(to, to.options().device(at::kCPU));
    const of_draw_key key =
        of_key_of_stream(static_cast<uint64_t>(seed), static_cast<uint32_t>(step),
                         static_cast<uint32_t>(parameter), static_cast<uint32_t>(stream));
    auto *out = here.mutable_data_ptr<int32_t>();
    const int64_t halves = dtype == at::kBFloat16 ? 2 : 1, chunk = 64 * halves;
    of_words words;
    for (int64_t at = first, end = first + here.numel(); at < end; at++) {
        if (at == first || at % chunk == 0)
            of_draw_chunk(words, static_cast<uint64_t>(at / chunk), &key);
        const int64_t row = at % chunk / OF_DRAW_LANES;
        const uint32_t word = words[row / halves][at % OF_DRAW_LANES];
        *out++ = static_cast<int32_t>(halves == 1 ? word : word >> (row % 2 * 16) & 0xffffu);
    }
    if (!to.is_cpu())
        to.copy_(here);
}

// Nothing: the first-use fallback has launched the update by now, and in
// access() refused a consumed gradient.
void access(const at::Tensor &) {}
void launch_pending(const at::Tensor &) {}

// For the loader's check that errors arrive as optfuse.Error.
void raise_error(const std::string &message) {
    fail(message);
}

} // namespace
} // namespace optfuse

TORCH_LIBRARY(optfuse, m) {
    m.def("set_slots(int plan, Tensor[] params, int[] groups, int[] eager, int[] used, "
          "int[] tried, int tried_on_cpu, str[] labels) -> ()",
          optfuse::set_slots);
    m.def("set_state(int plan, int slot, Tensor?[] state, Tensor? step, bool first) -> ()",
          optfuse::tell_state);
    m.def("set_device_scalars(int plan, Tensor?[] lr, Tensor? grad_scale, Tensor? found_inf) -> ()",
          optfuse::set_device_scalars);
    m.def("attach(int plan, Tensor[] params) -> ()", optfuse::attach_all);
    m.def("detach(int plan, Tensor[] params) -> ()", optfuse::detach);
    m.def("set_reduced(int plan, int[] slots) -> ()", optfuse::set_reduced);
    m.def("take_parts(int plan, int[] slots, Tensor bucket, int[] offsets) -> bool",
          optfuse::take_parts_of);
    m.def("give_parts(Tensor[] params, Tensor bucket, int[] offsets) -> ()", optfuse::give_parts);
    m.def("reduced(int plan, int[] slots) -> ()", optfuse::reduced);
    m.def("expect(Tensor[] params, Tensor bucket, int[] offsets, Future(Any) reduction, "
          "int group) -> int[]",
          torch::CppFunction::makeFromBoxedFunction<&optfuse::expect_gradients>());
    m.def("lend(int plan, int[] slots, Tensor[] grads) -> ()", optfuse::lend);
    m.def("know_wrappers(int plan, int slot, Tensor[] wrappers) -> ()", optfuse::know_wrappers);
    m.def("note_versions(int plan, int[] slots) -> ()", optfuse::note_versions_of);
    m.def("take_back(int plan, bool stepped) -> ()", optfuse::take_back);
    m.def("complete(int plan, int[] slots, Tensor[] grads, Tensor[] siblings, bool only_kept) "
          "-> int[]",
          optfuse::complete);
    m.def("know_aliases(int plan, int slot, Tensor[] candidates) -> ()", optfuse::know_aliases);
    m.def("consumed_like(int plan, Tensor local) -> Tensor", optfuse::consumed_like);
    m.def("consume(int plan, int[] slots) -> int[]", optfuse::consume_all);
    m.def("are_consumed(Tensor[] gradients) -> bool[]", optfuse::are_consumed);
    m.def("consume_by(int plan, int slot, Tensor wrapper, Tensor local) -> ()",
          optfuse::consume_by_wrapper);
    m.def("gpu_bits_differ(str rule, float[] hyper, ScalarType dtype, Device device, str label, "
          "bool mixed) -> bool",
          optfuse::bits_differ);
    m.def("seal(Tensor[] tensors) -> int[]", optfuse::seal_all);
    m.def("unseal(Tensor[] tensors) -> ()", optfuse::unseal_all);
    m.def("access(Tensor tensor) -> ()", optfuse::access);
    m.def("launch(Tensor tensor) -> ()", optfuse::launch_pending);
    m.def("draw(Tensor(a!) to, ScalarType dtype, int seed, int step, int parameter, int stream, "
          "int first) -> ()",
          optfuse::draw);
    m.def("would_set_threads() -> bool", optfuse::would_set_threads);
    m.def("raise_error(str message) -> ()", optfuse::raise_error);
}
