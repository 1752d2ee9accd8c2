// SPDX-License-Identifier: BSD-3-Clause
#include "recorded/tape.h"

#include <ATen/ScalarOps.h>
#include <ATen/native/TensorIterator.h>
#include <ATen/ops/clone.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <utility>

#include "base/error.h"
#include "base/plain_mode.h"
#include "guard.h"
#include "python/interpreter.h"
#include "recorded/schedule.h"

namespace optfuse::recorded {

void forget_absent(void *) {}

uintptr_t Tape::next_id() {
    static std::atomic<uintptr_t> last{0};
    return ++last;
}

void Tape::begin(Kind what) {
    counts = {};
    kind = what;
    graph_task = torch::autograd::get_current_graph_task_id();
    first_met.clear();
}

void Tape::meets(const std::string &what) {
    if (kind == Kind::PLAIN)
        return;
    if (first_met.empty())
        first_met = what;
    if (kind == Kind::AHEAD)
        fail("optfuse: this step() " + what +
             ", which the steps before did not; backward fusion has called it before all gradients "
             "are there. Nothing was updated; use optfuse.fuse(optimizer, mode=\"forward\")");
}

bool Tape::is_in_backward() const {
    return torch::autograd::get_current_graph_task_id() != graph_task;
}

at::Tensor Tape::absent(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                        c10::Device device) {
    return make_absent(sizes, strides, dtype, device, context(), forget_absent);
}

// Longer tapes would leave the processor's caches; on a GPU each costs a launch.
constexpr size_t kMostLines = 512, kMostOnGpu = 8192;

void Tape::drop_garbage() {
    const int state = of_interpreter.take_gil();
    garbage.clear();
    garbage_bytes = 0;
    of_interpreter.give_gil(state);
}

void Tape::begin_line(const std::optional<of_stream> &stream) {
    const Settings now;
    if (stream && !own_streams.has(*stream) && OF_GUARD(ahead_streams))
        meets("works on other streams of GPUs than its caller's");
    if (!lines.empty() && !(now == settings) && OF_GUARD(recorded_settings)) {
        meets("changes settings such as the number of threads");
        play();
    }
    if ((lines.size() >= (stream ? kMostOnGpu : kMostLines) && kind == Kind::PLAIN) ||
        (stream && !streams.have_room_for(*stream) && OF_GUARD(recorded_stream)))
        play();
    if (garbage.size() >= kMostLines)
        drop_garbage();
    settings = now;
    if (stream)
        streams.put(*stream);
}

void Tape::seal_written(const at::Tensor &tensor, bool is_counted) {
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    if (is_counted && (!is_ahead() || is_absent(storage_of(impl))))
        impl->bump_version();
    if (is_ahead()) {
        written.insert(storage_of(impl));
        return;
    }
    if (is_sealed(storage_of(impl)))
        return;
    seal(storage_of(impl));
    sealed.push_back(impl->unsafe_storage());
}

void Tape::seal_read(const at::Tensor &tensor) {
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    c10::StorageImpl *storage = storage_of(impl);
    if (is_ahead() || is_small(storage) || is_sealed(storage) || write_seal_flag(storage) ||
        !OF_GUARD(recorded_seal))
        return;
    set_write_seal(storage, true);
    write_sealed.push_back(impl->unsafe_storage());
}

// A tensor that PyTorch has made of a number for this call alone need not live as long as the line.
static void take_number(c10::IValue *value) {
    if (!value->isTensor() || !value->toTensor().unsafeGetTensorImpl()->is_wrapped_number())
        return;
    const c10::TensorImpl *impl = value->toTensor().unsafeGetTensorImpl();
    if (impl->dtype().toScalarType() == at::kDouble)
        *value = *static_cast<const double *>(data_of(impl));
    else if (impl->dtype().toScalarType() == at::kLong)
        *value = *static_cast<const int64_t *>(data_of(impl));
}

torch::jit::Stack arguments_of(const Line &line, const std::vector<c10::IValue> &values) {
    torch::jit::Stack stack(values.begin() + line.first, values.begin() + line.results);
    for (size_t i = 0; i < stack.size(); i++)
        if (line.known->tensor[i] && (stack[i].isDouble() || stack[i].isInt())) {
            at::Tensor number = c10::scalar_to_tensor(stack[i].toScalar());
            number.unsafeGetTensorImpl()->set_wrapped_number(true);
            stack[i] = std::move(number);
        }
    return stack;
}

uint32_t Tape::take_arguments(const Known &k, torch::jit::Stack *stack) {
    const auto first = static_cast<uint32_t>(values.size());
    const auto from = stack->end() - static_cast<std::ptrdiff_t>(k.n);
    values.insert(values.end(), std::make_move_iterator(from), std::make_move_iterator(stack->end()));
    stack->resize(stack->size() - k.n);
    counts.lines++;
    for (size_t i = 0; i < k.n; i++) {
        if (k.may_fuse && k.tensor[i])
            take_number(&values[first + i]);
        each_tensor(values[first + i], [this](const at::Tensor &tensor) {
            seal_read(tensor);
            return true;
        });
    }
    return first;
}

void Tape::write(const c10::OperatorHandle &op, const Known &k, torch::jit::Stack *stack,
                 bool is_counted) {
    const uint32_t first = take_arguments(k, stack);
    for (size_t i = 0; i < k.n; i++)
        if (k.writes[i])
            each_tensor(values[first + i], [this, is_counted](const at::Tensor &tensor) {
                seal_written(tensor, is_counted);
                return true;
            });
    for (const size_t i : k.returned)
        stack->push_back(values[first + i]);
    const auto end = static_cast<uint32_t>(values.size());
    lines.push_back({op, &k, first, end, end});
}

void Tape::make(const c10::OperatorHandle &op, const Known &k, torch::jit::Stack *stack,
                std::vector<c10::IValue> &&results) {
    const uint32_t first = take_arguments(k, stack);
    const auto middle = static_cast<uint32_t>(values.size());
    for (c10::IValue &result : results) {
        values.push_back(result);
        stack->push_back(std::move(result));
    }
    lines.push_back({op, &k, first, middle, static_cast<uint32_t>(values.size())});
}

bool Tape::touches(const c10::StorageImpl *storage) {
    for (; n_touched < values.size(); n_touched++)
        each_tensor(values[n_touched], [this](const at::Tensor &tensor) {
            touched.insert(storage_of(tensor.unsafeGetTensorImpl()));
            return true;
        });
    return touched.find(storage) != touched.end();
}

bool Tape::has_line_before_read(const c10::TensorImpl *impl) {
    c10::StorageImpl *storage = storage_of(impl);
    if (is_ahead())
        return is_absent(storage) || is_written_by_line(storage);
    return is_sealed(storage) || write_seal_flag(storage);
}

// Lines that read a small tensor before the script writes to it have a copy.
bool Tape::has_line_before_write(const c10::TensorImpl *impl) {
    c10::StorageImpl *storage = storage_of(impl);
    if (has_line_before_read(impl))
        return true;
    if (!touches(storage))
        return false;
    if (!is_ahead() || !is_small(storage))
        return true;
    copy_where_read(storage);
    return false;
}

void Tape::copy_where_read(c10::StorageImpl *storage) {
    const PlainMode plain;
    const c10::impl::ExcludeDispatchKeyGuard not_recorded(kPendingKey);
    const auto is_its = [storage](const c10::IValue &value) {
        return value.isTensor() && value.toTensor().defined() &&
               storage_of(value.toTensor().unsafeGetTensorImpl()) == storage;
    };
    for (c10::IValue &value : values) {
        if (is_its(value)) {
            value = value.toTensor().clone();
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> list = value.toTensorList();
            for (size_t i = 0; i < list.size(); i++)
                if (is_its(list.get(i)))
                    list.set(i, list.get(i).clone());
        }
    }
    touched.erase(storage);
}

void Tape::is_written_at_once(const at::Tensor &tensor, const std::string &op) {
    if (kind == Kind::PLAIN || !tensor.has_storage())
        return;
    c10::StorageImpl *storage = storage_of(tensor.unsafeGetTensorImpl());
    if (!is_small(storage) || is_param(storage) || !tensor.is_cpu()) {
        meets("writes by an operator that runs at once (" + op + ")");
    } else if (is_ahead()) {
        std::array<char, 8> before = {};
        std::memcpy(before.data(), address(storage), storage->nbytes());
        undo.push_back({tensor.unsafeGetTensorImpl()->unsafe_storage(), before});
    }
}

void Tape::take_lines(std::vector<Line> *its_lines, std::vector<c10::IValue> *its_values,
                      Settings *its_settings) {
    *its_lines = std::exchange(lines, {});
    *its_values = std::exchange(values, {});
    *its_settings = settings;
    touched.clear();
    n_touched = 0;
    written.clear();
}

void Tape::play() {
    if (lines.empty())
        return;
    counts.plays++;
    const Streams its_streams = std::exchange(streams, {});
    std::vector<Line> now;
    std::vector<c10::IValue> its;
    Settings when;
    take_lines(&now, &its, &when);
    for (const c10::Storage &storage : std::exchange(sealed, {}))
        unseal(storage.unsafeGetStorageImpl());
    for (const c10::Storage &storage : std::exchange(write_sealed, {}))
        set_write_seal(storage.unsafeGetStorageImpl(), false);
    RECORD_USER_SCOPE("optfuse::recorded"); // in a profiler's trace
    // Versions were counted when the lines were written.
    const PlainMode plain;
    const WithSettings as_called(when);
    const WithStreams where_called(its_streams);
    const c10::impl::ExcludeDispatchKeyGuard not_recorded(kPendingKey);
    run_lines(now, its, this);
    for (c10::IValue &value : its)
        drop_later(std::move(value));
    if (lines.empty()) { // their room
        now.clear();
        its.clear();
        lines.swap(now);
        values.swap(its);
    }
}

} // namespace optfuse::recorded
