// SPDX-License-Identifier: BSD-3-Clause
// record.cpp: while this thread records a step(), each operator is written on the tape, or run behind
// the lines that it needs.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/plain_mode.h"
#include "guard.h"
#include "host/first_use.h"
#include "python/gil.h"
#include "recorded/forms.h"
#include "recorded/tape.h"

namespace optfuse::recorded {
namespace {

using Stack = torch::jit::Stack;

// Keys of a dense tensor on the CPU or a GPU, and of nothing else.
const c10::DispatchKeySet kPlain = c10::DispatchKeySet(
    {c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutocastCPU,
     c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCUDA, c10::DispatchKey::AutocastCUDA,
     c10::DispatchKey::PrivateUse1, c10::DispatchKey::AutogradPrivateUse1,
     c10::DispatchKey::AutocastPrivateUse1, c10::DispatchKey::ADInplaceOrView, kPendingKey});

// Modes under which operators are more than what they compute.
const c10::DispatchKeySet kModes =
    c10::python_ks | c10::functorch_transforms_ks | c10::autocast_dispatch_keyset |
    c10::DispatchKeySet(c10::DispatchKey::Tracer);

// Whether an update of another optimizer may be on its way to it, which is launched then.
bool is_in_flight(const c10::TensorImpl *impl) {
    const WithoutGil wait;
    return use_memory(impl, false) != OF_NOTHING_PENDING;
}

// An operator that a recorded step() calls.
class Called {
  public:
    Called(Tape *its, const OperatorCall &which)
        : tape(its), call(which), op(which.op), keys(which.keys), stack(which.stack),
          k(known(which.op)), n(which.n()) {}

    void answer() {
        if (k.way == Way::THROUGH && !(keys & kModes).has_any(kModes))
            call.go_on();
        else if (k.way == Way::LOOK || k.is_ours)
            show();
        else if (k.way == Way::VIEW && !is_others())
            run();
        else if (k.way < Way::WRITE || is_straight() || !has_plain_tensors())
            run_at_once();
        else if (!record())
            run_at_once();
    }

  private:
    const c10::IValue *args() const { return stack->data() + stack->size() - n; }
    template <typename Work> bool each(const Work &work) const {
        return each_tensor(args(), n, work);
    }

    // Its own operators are not recorded.
    void run() {
        const c10::impl::ExcludeDispatchKeyGuard off(kPendingKey);
        call.go_on();
    }

    bool is_absent_here(const c10::StorageImpl *storage) const {
        return is_absent(storage) && data_ptr_of(storage).get_context() == tape->context();
    }

    // An update that is pending, of another optimizer, a promise or the like: its memory is sealed,
    // but for a GPU's and a bucket's of DistributedDataParallel. Aliases of what lines have made, and
    // what an update on a side stream has written, may have a mark that nobody has taken off.
    bool is_others(const at::Tensor &tensor) const {
        c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
        if (!has_mark(impl) || (impl->has_storage() && is_absent_here(storage_of(impl))))
            return false;
        if (!impl->has_storage() || impl->is_python_dispatch() || is_sealed(storage_of(impl)) ||
            is_in_flight(impl))
            return true;
        if (!marks_stay())
            unmark(impl);
        return false;
    }
    bool is_others() const {
        return !each([this](const at::Tensor &tensor) { return !is_others(tensor); });
    }

    // Whether lines have to run first: they read or write memory of its tensors. Counters, which
    // have no seal against writing, it may read beside lines.
    bool needs_lines() const {
        if (tape->is_empty() && !tape->is_ahead()) // else there are stand-ins
            return false;
        if (k.reads_all || tape->is_in_backward())
            return true;
        for (size_t i = 0; i < n; i++) {
            const bool writes = k.writes[i] || k.way == Way::LOOK;
            const bool is_free = each_tensor(args()[i], [&](const at::Tensor &tensor) {
                const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
                return impl->has_storage() && !impl->is_python_dispatch() &&
                       !(writes ? tape->has_line_before_write(impl)
                                : tape->has_line_before_read(impl));
            });
            if (!is_free)
                return true;
        }
        return false;
    }

    // Tells a step() that runs, or could, before its gradients are there.
    void look_at_once() {
        if (k.way == Way::DRAW)
            tape->meets("draws random numbers");
        if (k.reads_all)
            tape->meets("calls an operator of another library (" + op.schema().name() + ")");
        if (tape->is_in_backward())
            tape->meets("calls backward()");
        each([this](const at::Tensor &tensor) {
            if (!tensor.has_storage() || tensor.unsafeGetTensorImpl()->is_python_dispatch())
                tape->meets("uses tensors of a subclass");
            return true;
        });
        for (size_t i = 0; i < n; i++)
            if (k.writes[i])
                each_tensor(args()[i], [this](const at::Tensor &tensor) {
                    tape->is_written_at_once(tensor, op.schema().name());
                    return true;
                });
        look_for_gpus(args(), n);
    }

    // No stream puts in order with the lines what runs on a GPU at once.
    void look_for_gpus(const c10::IValue *values, size_t n_values) {
        const auto is_elsewhere = [](const at::Tensor &tensor) { return !is_gpu(tensor.device()); };
        if (tape->is_watched() && !each_tensor(values, n_values, is_elsewhere) &&
            OF_GUARD(ahead_at_once))
            tape->meets("calls an operator that runs on a GPU at once (" + op.schema().name() + ")");
    }

    void run_at_once() {
        const bool needs = !k.makes_blank && needs_lines() && OF_GUARD(recorded_order);
        if (needs || (!k.makes_blank && reads_gradient()))
            tape->meets("looks at numbers (" + op.schema().name() + ")");
        if (needs)
            tape->play();
        look_at_once();
        tape->counts.at_once++;
        const c10::impl::ExcludeDispatchKeyGuard off(kPendingKey);
        if (is_others())
            use_marked(call);
        else
            call.go_on();
        const size_t results = op.schema().returns().size();
        look_for_gpus(stack->data() + stack->size() - results, results);
    }

    // Runs an operator behind which code has the tensors' addresses.
    void show() {
        const bool may_write = k.is_ours;
        bool touched = may_write && !tape->is_empty();
        each([&](const at::Tensor &tensor) {
            touched |= tensor.has_storage() &&
                       tape->touches(storage_of(tensor.unsafeGetTensorImpl()));
            return true;
        });
        if (touched || reads_gradient())
            tape->meets("looks at numbers past PyTorch's operators");
        if (touched)
            tape->play();
        each([this](const at::Tensor &tensor) {
            if (!tensor.has_storage())
                return true;
            c10::StorageImpl *storage = storage_of(tensor.unsafeGetTensorImpl());
            if (!is_small(storage))
                tape->meets("takes the address of a tensor");
            optfuse::recorded::show(storage);
            return true;
        });
        const c10::impl::ExcludeDispatchKeyGuard off(kPendingKey);
        use_marked(call);
    }

    // Whether it is a part of a graph, of a backward pass or of what a mode sees.
    bool is_straight() const {
        if ((keys & kModes).has_any(kModes) || c10::InferenceMode::is_enabled() ||
            tape->is_in_backward())
            return true;
        return c10::GradMode::is_enabled() && OF_GUARD(recorded_graph) &&
               !each([](const at::Tensor &tensor) { return !tensor.requires_grad(); });
    }

    bool may_be_on_tape(const at::Tensor &tensor) const {
        c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
        if ((impl->key_set().raw_repr() & ~kPlain.raw_repr()) != 0 || !impl->has_storage() ||
            impl->is_inference() || !(impl->is_cpu() || is_gpu(impl->device())))
            return false;
        c10::StorageImpl *storage = storage_of(impl);
        if (is_absent(storage))
            return is_absent_here(storage);
        return !is_others(tensor) && is_own(storage) && !is_shown(storage);
    }

    // And more than counters, which nobody waits for. All on one device, but for numbers: what comes
    // from another one the host may wait for.
    bool has_plain_tensors() {
        bool has_any = false, are_small = true, writes = false;
        std::optional<c10::Device> device;
        const auto is_plain = [&](const at::Tensor &tensor) {
            const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
            if (impl->is_wrapped_number())
                return true;
            has_any = true;
            if (!may_be_on_tape(tensor))
                return false;
            are_small &= is_small(storage_of(impl));
            if (impl->is_cpu() && impl->dim() == 0 && !writes)
                return true;
            if (!device)
                device = impl->device();
            return *device == impl->device();
        };
        for (size_t i = 0; i < n; i++) {
            writes = k.writes[i];
            if (!each_tensor(args()[i], is_plain))
                return false;
        }
        if (!has_any)
            return is_made_on_gpu();
        return (!are_small || needs_lines() || writes_param() || reads_gradient()) && has_place(device);
    }

    // A new tensor, of no other one's device.
    bool is_made_on_gpu() {
        for (size_t i = 0; i < n; i++)
            if (args()[i].isDevice() && is_gpu(args()[i].toDevice()))
                return args()[i].toDevice().has_index() && has_place(args()[i].toDevice());
        return false;
    }

    // On a GPU its stream, which takes lines: what a graph captures runs at once.
    bool has_place(const std::optional<c10::Device> &device) {
        if (!device || device->is_cpu())
            return true;
        stream = current_stream(device->index());
        return cuda_library() != nullptr && (stream->capture == 0 || !OF_GUARD(recorded_capture));
    }

    bool reads_gradient() const {
        return tape->is_watched() && !tape->gradients.empty() &&
               !each([this](const at::Tensor &tensor) { return !tape->is_gradient(tensor); });
    }

    bool writes_param() const {
        for (size_t i = 0; tape->is_watched() && i < n; i++)
            if (k.writes[i] && !each_tensor(args()[i], [this](const at::Tensor &tensor) {
                    return !tape->is_param(storage_of(tensor.unsafeGetTensorImpl()));
                }))
                return true;
        return false;
    }

    // Operands that share some elements make some operators fail.
    bool may_overlap() const {
        for (size_t i = 0; i < n; i++) {
            if (!k.writes[i] || !args()[i].isTensor())
                continue;
            const c10::TensorImpl *to = args()[i].toTensor().unsafeGetTensorImpl();
            const bool are_apart = each([to](const at::Tensor &tensor) {
                const c10::TensorImpl *other = tensor.unsafeGetTensorImpl();
                return to == other || storage_of(to) != storage_of(other) ||
                       (to->storage_offset() == other->storage_offset() &&
                        equal(to->sizes(), other->sizes()) &&
                        equal(to->strides(), other->strides()));
            });
            if (!are_apart)
                return true;
        }
        return false;
    }

    bool record() {
        if (k.way == Way::WRITE && may_overlap() && OF_GUARD(recorded_overlap))
            return false;
        // On lists PyTorch's operators for GPUs count no versions, where they don't take them one by one.
        const bool counts = !(stream && k.of_lists && k.way == Way::WRITE);
        if (k.elementwise && counts)
            if (auto results = forms_by_rule(tape, k, args())) {
                put(std::move(*results), true);
                return true;
            }
        if (k.fits) {
            put({}, true);
            return true;
        }
        if (!Learned::look_up(k, args()))
            return false;
        if (!Learned::is_known() && tape->is_watched()) {
            learn_beside();
            Learned::look_up(k, args());
        }
        if (!Learned::is_known()) {
            learn();
            return true;
        }
        if (!Learned::is_line())
            return false;
        put(k.way == Way::MAKE ? Learned::results(tape) : std::vector<c10::IValue>(),
            Learned::counts());
        return true;
    }

    void put(std::vector<c10::IValue> &&results, bool counts) {
        tape->begin_line(stream);
        if (k.way == Way::WRITE)
            tape->write(op, k, stack, counts);
        else
            tape->make(op, k, stack, std::move(results));
    }

    void learn() {
        const std::vector<c10::IValue> given(args(), args() + n);
        const uint32_t before = version_in(given);
        run_at_once();
        const size_t results = op.schema().returns().size();
        Learned::learn(k, given, stack->data() + stack->size() - results, results,
                       version_in(given) != before);
    }

    uint32_t version_in(const std::vector<c10::IValue> &given) const {
        uint32_t its = 0;
        for (size_t i = 0; i < n; i++)
            if (k.writes[i])
                each_tensor(given[i], [&](const at::Tensor &tensor) {
                    its = tensor.unsafeGetTensorImpl()->version_counter().current_version();
                    return false;
                });
        return its;
    }

    // On other numbers: those that there are may be to come.
    void learn_beside() {
        const c10::impl::ExcludeDispatchKeyGuard off(kPendingKey);
        std::optional<PlainMode> plain(std::in_place);
        const auto other = [](const at::Tensor &tensor) {
            if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number())
                return tensor;
            return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options()).fill_(1);
        };
        std::vector<c10::IValue> given;
        for (size_t i = 0; i < n; i++) {
            const c10::IValue &value = args()[i];
            if (value.isTensorList()) {
                c10::List<at::Tensor> list;
                for (const at::Tensor &tensor : value.toTensorVector())
                    list.push_back(other(tensor));
                given.emplace_back(std::move(list));
            } else {
                given.push_back(value.isTensor() ? c10::IValue(other(value.toTensor())) : value);
            }
        }
        Stack beside(given.begin(), given.end());
        const uint32_t before = version_in(given);
        plain.reset(); // which counts no versions
        const c10::AutoGradMode no_grad(false);
        op.callBoxed(beside);
        Learned::learn(k, given, beside.data(), beside.size(), version_in(given) != before);
    }

    Tape *const tape;
    const OperatorCall &call;
    const c10::OperatorHandle &op;
    const c10::DispatchKeySet keys;
    Stack *const stack;
    const Known &k;
    const size_t n;
    std::optional<of_stream> stream; // of a line on a GPU
};

// Not for those of an operator that it has begun.
bool begin_recorded(const OperatorCall &call) {
    Tape *const tape = open_tape();
    if (tape == nullptr || c10::impl::tls_is_dispatch_key_excluded(kPendingKey))
        return false;
    Called(tape, call).answer();
    return true;
}

Run answer_recorded(const char *op, c10::TensorImpl *impl, bool) {
    const Tape *const tape = open_tape();
    if (tape == nullptr || data_ptr_of(storage_of(impl)).get_context() != tape->context())
        fail(std::string("optfuse: ") + op +
             " uses a tensor that a step() on another thread has made and not computed yet; read it "
             "on that thread before, by item() or numpy()");
    return nullptr;
}

} // namespace
} // namespace optfuse::recorded

namespace optfuse {

const Absent absent::recorded = {recorded::forget_absent, recorded::answer_recorded, nullptr,
                                 nullptr,                 recorded::begin_recorded};

} // namespace optfuse

