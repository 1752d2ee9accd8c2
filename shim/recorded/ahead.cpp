// SPDX-License-Identifier: BSD-3-Clause
#include "recorded/ahead.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absent/consumed.h"
#include "base/error.h"
#include "base/plain_mode.h"
#include "plan/plan.h"
#include "plan/references.h"
#include "plan/slots.h"
#include "python/gil.h"
#include "recorded/owners.h"
#include "recorded/schedule.h"

namespace optfuse::recorded {
namespace {

Geometry geometry_of(const c10::TensorImpl *impl) {
    const auto sizes = impl->sizes(), strides = impl->strides();
    return {true,
            {sizes.begin(), sizes.end()},
            {strides.begin(), strides.end()},
            c10::typeMetaToScalarType(impl->dtype()),
            impl->device()};
}

bool has_geometry(const c10::TensorImpl *impl, const Geometry &its) {
    return impl->sizes().equals(its.sizes) && impl->strides().equals(its.strides) &&
           impl->dtype() == its.dtype && impl->device() == its.device;
}

bool is_plain(const at::Tensor &gradient) {
    const c10::TensorImpl *impl = gradient.unsafeGetTensorImpl();
    return gradient.layout() == at::kStrided && impl->has_storage() &&
           (gradient.is_cpu() || is_gpu(gradient.device())) && !impl->is_python_dispatch() &&
           impl->is_non_overlapping_and_dense();
}

// A gradient that an update has used up is none.
bool has_gradient(const Slot &slot) {
    const at::Tensor &gradient = slot.param->grad();
    return gradient.defined() && !is_consumed(gradient.unsafeGetTensorImpl());
}

// Whether the pass that runs here brings a gradient to the parameter.
bool gets_gradient(const Slot &slot) {
    const auto *meta = static_cast<torch::autograd::AutogradMeta *>(slot.param->autograd_meta());
    const auto node = meta == nullptr ? nullptr : meta->grad_accumulator_.lock();
    const auto *nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
    if (node == nullptr || nodes == nullptr || nodes->count(node.get()) == 0)
        return false;
    const auto *needed = torch::autograd::get_current_graph_task_exec_info();
    if (needed == nullptr || needed->empty())
        return true;
    const auto found = needed->find(node.get());
    return found != needed->end() && found->second.should_execute();
}

std::vector<Anchor> anchors_of(const Plan &plan, const std::vector<Part> *parts) {
    std::vector<Anchor> anchors;
    for (const Slot *slot : plan.slots) {
        anchors.push_back({storage_of(slot->param), slot->index, false});
        const at::Tensor &gradient =
            parts == nullptr ? slot->param->grad() : (*parts)[slot->index].stand_in;
        if (gradient.defined() && gradient.has_storage())
            anchors.push_back({storage_of(gradient.unsafeGetTensorImpl()), slot->index, true});
    }
    return anchors;
}

Streams current_streams(const Plan &plan) {
    Streams streams;
    for (const Slot *slot : plan.slots) {
        const c10::Device device = slot->param->device();
        if (is_gpu(device) && !streams.has_one_of(device.index()))
            streams.put(current_stream(device.index()));
    }
    return streams;
}

void know_params(const Plan &plan, Tape *tape) {
    tape->params.clear();
    tape->gradients.clear();
    tape->own_streams = current_streams(plan);
    for (const Slot *slot : plan.slots)
        tape->params.insert(storage_of(slot->param));
}

using Uses = ska::flat_hash_map<c10::TensorImpl *, size_t>;

Uses uses_in(const std::vector<c10::IValue> &values) {
    Uses uses;
    each_tensor(values.data(), values.size(), [&uses](const at::Tensor &tensor) {
        uses[tensor.unsafeGetTensorImpl()]++;
        return true;
    });
    return uses;
}

// Those on a GPU may have been allocated for another stream, and die before this one is through.
void record_on(const of_stream &stream, const std::vector<c10::IValue> &values) {
    for (const auto &[impl, n] : uses_in(values))
        if (impl->has_storage() && is_gpu(impl->device()) && !is_absent(storage_of(impl)))
            record_on_stream(storage_of(impl), stream);
}

// How many tensors but `its` use its memory; or kHeld, if somebody but those values holds one of them.
constexpr size_t kHeld = SIZE_MAX;

size_t aliases_of(const c10::TensorImpl *its, const Uses &uses) {
    size_t n_aliases = 0;
    for (const auto &[impl, n] : uses) {
        if (impl == its || !impl->has_storage() || storage_of(impl) != storage_of(its))
            continue;
        n_aliases++;
        if (c10::raw::intrusive_ptr::use_count(impl) != n + idle_references(*impl))
            return kHeld;
    }
    return n_aliases;
}

// Whether somebody has an alias of the gradient behind step(). (The loader asks for the gradient itself.)
bool is_kept(const at::Tensor &gradient, const Uses &uses) {
    const size_t known = aliases_of(gradient.unsafeGetTensorImpl(), uses);
    const c10::Storage &storage = gradient.storage();
    return known == kHeld ||
           storage.use_count() > 1 + known + idle_references(*storage.unsafeGetStorageImpl());
}

constexpr const char *kKeeps = "keeps a gradient";

// The versions count what the lines of a part write.
void count_versions(const Part &part) {
    for (const Line &line : part.lines)
        for (size_t i = 0; i < line.known->n; i++)
            if (line.known->writes[i])
                each_tensor(part.values[line.first + i], [](const at::Tensor &tensor) {
                    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
                    if (!is_absent(storage_of(impl)) && impl->version_counter().enabled())
                        impl->bump_version();
                    return true;
                });
}

void exchange_back(std::vector<Undo> *undo) {
    for (auto one = undo->rbegin(); one != undo->rend(); ++one)
        one->exchange();
}

} // namespace

Ahead &ahead_of(Plan &plan) {
    if (!plan.ahead) {
        updates_take_the_gil(); // to see who has what their lines have made
        plan.ahead = std::make_shared<Ahead>();
    }
    return *ahead_in(plan);
}

void Ahead::begin_watched(const Plan &plan, Tape *its) {
    know_params(plan, its);
    device.reset();
    of_step = Settings();
    if (!its->own_streams.all.empty())
        device = c10::impl::VirtualGuardImpl(gpu_type()).getDevice();
    gradients.assign(plan.slots.size(), {});
    params.resize(plan.slots.size());
    why.clear();
    n_watched++;
    for (const Slot *slot : plan.slots) {
        params[slot->index] = geometry_of(slot->param);
        const at::Tensor &gradient = slot->param->grad();
        if (gradient.defined())
            compute_now(gradient.unsafeGetTensorImpl());
        if (!slot->wrappers.empty())
            why = "has DTensors";
        if (!gradient.defined())
            continue;
        if (gradient.has_storage())
            its->gradients.insert(storage_of(gradient.unsafeGetTensorImpl()));
        if (is_plain(gradient))
            gradients[slot->index] = geometry_of(gradient.unsafeGetTensorImpl());
        else
            why = "has gradients that are not dense ones";
        if (gradient.is_cpu() && device)
            why = "has parameters on the CPU and on GPUs";
    }
}

void Ahead::end_watched(const Plan &plan, const Tape &its) {
    if (why.empty())
        why = its.met();
    if (why.empty() && its.counts.plays == 0)
        why = share_out(its.lines_now(), its.values_now(), anchors_of(plan, nullptr), nullptr);
}

void Ahead::look_for_kept(const Plan &plan) {
    for (const Slot *slot : plan.slots)
        if (why.empty() && slot->param->grad().defined() && is_kept(slot->param->grad(), {}))
            why = kKeeps;
}

bool Ahead::can_begin(const Plan &plan) const {
    constexpr int kWatched = 2;
    if (has_begun() || n_watched < kWatched || !why.empty() || gradients.size() != plan.slots.size() ||
        open_tape() != nullptr)
        return false;
    for (const of_stream &stream : current_streams(plan).all)
        if (stream.capture != 0 && OF_GUARD(ahead_capture)) // of which step() may be no part
            return false;
    bool any = false;
    for (const Slot *slot : plan.slots) {
        const bool is_expected = gradients[slot->index].is_there;
        any |= is_expected;
        if (!has_geometry(slot->param, params[slot->index])) // so its gradient has another one, too
            return false;
        if (!plan.reduces && is_expected != (has_gradient(*slot) || gets_gradient(*slot)))
            return false;
    }
    return any;
}

bool Ahead::has_begun_here() const {
    return has_begun() && torch::autograd::get_current_graph_task_id() == graph_task;
}

std::vector<at::Tensor> Ahead::stand_ins(const Plan &plan) {
    graph_task = torch::autograd::get_current_graph_task_id();
    its_tape = std::make_unique<Tape>();
    know_params(plan, its_tape.get());
    parts = std::vector<Part>(plan.slots.size());
    for (Slot *slot : plan.slots)
        slot->program.reset();
    std::vector<at::Tensor> made(parts.size());
    for (size_t i = 0; i < parts.size(); i++)
        if (const Geometry &of = gradients[i]; of.is_there)
            made[i] = parts[i].stand_in =
                its_tape->absent(of.sizes, of.strides, of.dtype, of.device);
    return made;
}

void Ahead::end_step(const Plan &plan) {
    std::vector<Line> lines;
    std::vector<c10::IValue> values;
    const std::vector<Anchor> anchors = anchors_of(plan, &parts);
    hide_numbers();
    its_tape->take_lines(&lines, &values, &settings);
    const std::string reason = share_out(lines, values, anchors, &parts);
    lines.clear();
    values.clear();
    if (!reason.empty())
        its_tape->meets(reason);
    for (const Part &part : parts)
        if (part.stand_in.defined() && is_kept(part.stand_in, uses_in(part.values)))
            its_tape->meets(kKeeps);
    const PlainMode plain;
    const c10::impl::ExcludeDispatchKeyGuard not_recorded(kPendingKey);
    std::vector<std::shared_ptr<const Program>> known;
    for (Slot *slot : plan.slots)
        if (owns(slot->index))
            hand_over(slot, &known);
}

// The core gets a program, or is told that there are lines.
void Ahead::hand_over(Slot *slot, std::vector<std::shared_ptr<const Program>> *known) {
    static const auto lines = [] {
        const auto made = std::make_shared<Program>();
        made->core.by_host = true;
        return std::shared_ptr<const Program>(made);
    }();
    Part &part = parts[slot->index];
    std::vector<at::Tensor> state;
    slot->own.clear();
    slot->program = program_of(part.lines, part.values, slot->param,
                               part.stand_in.unsafeGetTensorImpl(), known, &state);
    if (slot->program) {
        for (c10::IValue &value : part.values)
            its_tape->drop_later(std::move(value));
        part.lines.clear();
        part.values.clear();
    } else {
        state.clear();
        slot->program = lines;
        for (const auto &[impl, n] : uses_in(part.values))
            if (impl->has_storage() && !impl->is_wrapped_number() && !is_absent(storage_of(impl)) &&
                storage_of(impl) != storage_of(slot->param))
                slot->own.push_back(reference_to(impl));
    }
    std::vector<std::optional<at::Tensor>> all(state.begin(), state.end());
    all.resize(slot->plan->rule->n_state + slot->plan->rule->n_counters);
    set_state(*slot, all, {}, false);
}

bool Ahead::owns(size_t slot) const {
    return has_begun() && slot < parts.size() && parts[slot].stand_in.defined();
}

bool Ahead::knows_all_users(const Slot &slot) const {
    const Uses uses = uses_in(parts[slot.index].values);
    const size_t aliases = aliases_of(slot.param, uses);
    constexpr size_t kOwn = 2; // the entry's and the slot's
    const auto is_shared = [&uses](const at::Tensor &state) {
        const auto found = uses.find(state.unsafeGetTensorImpl());
        return state.use_count() > kOwn + (found == uses.end() ? 0 : found->second);
    };
    return aliases != kHeld &&
           is_private(storage_of(slot.param), slot.aliases.size() + aliases) &&
           std::none_of(slot.own.begin(), slot.own.end(), is_shared);
}

void Ahead::run(size_t slot, const at::Tensor &gradient) {
    Part &part = parts[slot];
    if (!is_plain(gradient) || !has_geometry(gradient.unsafeGetTensorImpl(), gradients[slot]))
        fail("its gradient has other strides or another dtype than in the step before, by which "
             "step() has gone already; use optfuse.fuse(optimizer, mode=\"forward\")");
    c10::TensorImpl *impl = part.stand_in.unsafeGetTensorImpl();
    c10::StorageImpl *storage = storage_of(impl);
    count_versions(part);
    if (is_gpu(storage->device()) && OF_GUARD(ahead_memory))
        record_on(current_stream(storage->device().index()), part.values);
    // The gradient's memory for as long as the lines run, and nobody's.
    storage->set_data_ptr_noswap(
        c10::DataPtr(data_of(gradient.unsafeGetTensorImpl()), storage->device()));
    unseal(storage);
    const bool done = answers([&] {
        const PlainMode plain;
        const WithSettings as_called(settings);
        run_lines(part.lines, part.values, its_tape.get());
    });
    storage->set_data_ptr_noswap(
        c10::DataPtr(nullptr, its_tape->context(), forget_absent, storage->device()));
    seal(storage);
    for (c10::IValue &value : part.values)
        its_tape->drop_later(std::move(value));
    part.lines.clear();
    part.values.clear();
    if (!done)
        fail(std::string("optfuse: ") + of_error_message());
}

std::vector<size_t> Ahead::unexpected(const Plan &plan) const {
    std::vector<size_t> found;
    for (const Slot *slot : plan.slots) {
        const size_t i = slot->index;
        const bool is_seen = owns(i);
        const bool is_done = of_plan_is_updated(plan.core, i);
        if (is_seen ? !is_done && !has_gradient(*slot) : has_gradient(*slot))
            found.push_back(i);
    }
    return found;
}

// Small tensors are as before until step() is called. Lines that read them have copies; those to which
// lines write, too, are ahead.
void Ahead::hide_numbers() {
    auto &undo = its_tape->undo;
    const auto is_hidden = [this](const Undo &one) {
        return !its_tape->is_written_by_line(one.storage.unsafeGetStorageImpl());
    };
    const auto middle = std::stable_partition(undo.begin(), undo.end(), is_hidden);
    not_hidden.assign(middle, undo.end());
    undo.erase(middle, undo.end());
    for (const Undo &one : undo)
        its_tape->copy_where_read(one.storage.unsafeGetStorageImpl());
    exchange_back(&undo);
}

std::vector<int64_t> Ahead::written_numbers() const {
    std::vector<int64_t> found;
    ska::flat_hash_set<const void *> seen; // the first of a storage is what was there
    for (const Undo &one : its_tape->undo) {
        const void *const memory = address(one.storage.unsafeGetStorageImpl());
        if (seen.insert(memory).second &&
            std::memcmp(one.before.data(), memory, one.storage.nbytes()) != 0)
            found.push_back(static_cast<int64_t>(reinterpret_cast<intptr_t>(memory)));
    }
    return found;
}

void Ahead::confirm() {
    for (Undo &one : its_tape->undo)
        one.exchange();
    not_hidden.clear();
}

void Ahead::fail_step() {
    exchange_back(&its_tape->undo);
}

void Ahead::end() {
    exchange_back(&not_hidden);
    not_hidden.clear();
    parts.clear();
    its_tape.reset();
}

} // namespace optfuse::recorded
