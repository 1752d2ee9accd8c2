// SPDX-License-Identifier: BSD-3-Clause
// consumed.cpp: what .grad holds in backward mode once the update has consumed
// it. Metadata (shape, dtype, device) reads as usual; any operator that would
// read numbers raises, because no numbers are left.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absent/consumed.h"
#include "absent/kinds.h"
#include "base/compat.h"
#include "base/error.h"
#include "base/plain_mode.h"
#include "guard.h"
#include "memory/memory.h"
#include "python/callback.h"

namespace optfuse {
namespace {

// Stands in the place of a consumed gradient's memory, in a storage of its own: aliases, such as
// .data and detach(), have the same, so that numbers which are put there are those of all.
struct Consumed {
    // That has it, unless Python has exchanged two.
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::shared_ptr<const Steps> steps; // of the optimizer
    std::atomic<uint64_t> step;         // how many there were when the gradient was consumed
    std::atomic<uint64_t> use; // see consume_again(); kRounded: step() would use other numbers
    at::ScalarType dtype;      // that of the gradient; copies may be wider
};

constexpr uint64_t kRounded = 0;

// Stands in the place of the memory of a DTensor that reads as one.
struct Wrapped {
    at::Tensor local;    // its local tensor, which is consumed, too
    c10::Storage before; // its own
};

void free_wrapped(void *wrapped) {
    delete static_cast<Wrapped *>(wrapped);
}

c10::DataPtr &memory_of(const c10::TensorImpl *impl) {
    return storage_of(impl)->_mutable_data_ptr_no_checks();
}

// Those of the process. Their storages are sealed: an access past the dispatcher raises. While a
// profiler notes the addresses of tensors, it may have theirs.
struct AllConsumed {
    std::mutex lock; // guards the rest
    std::unordered_set<Consumed *> living;
    bool sealed = true;
};

AllConsumed &all_consumed() {
    static auto *all = new AllConsumed; // leaked: tensors may outlive destructors
    return *all;
}

// A consumed gradient is known by this deleter.
void free_consumed(void *consumed) {
    AllConsumed &all = all_consumed();
    const std::lock_guard<std::mutex> guard(all.lock);
    all.living.erase(static_cast<Consumed *>(consumed));
    delete static_cast<Consumed *>(consumed);
}

// Null: it has memory.
Consumed *consumed_of(const c10::TensorImpl *impl) {
    return memory_of(impl).get_deleter() == free_consumed
               ? static_cast<Consumed *>(memory_of(impl).get_context())
               : nullptr;
}

const Wrapped *wrapped_of(const c10::TensorImpl *impl) {
    return memory_of(impl).get_deleter() == free_wrapped
               ? static_cast<const Wrapped *>(memory_of(impl).get_context())
               : nullptr;
}

c10::Storage consumed_storage(const c10::Device &device, at::ScalarType dtype,
                              std::shared_ptr<const Steps> steps) {
    const auto made = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, device),
        device.is_meta() ? nullptr : c10::GetAllocator(device.type()), /*resizable=*/false);
    auto *consumed = new Consumed{c10::weak_intrusive_ptr<c10::StorageImpl>(made),
                                  std::move(steps), {0}, {kRounded}, dtype};
    made->set_data_ptr_noswap(c10::DataPtr(nullptr, consumed, free_consumed, device));
    AllConsumed &all = all_consumed();
    const std::lock_guard<std::mutex> guard(all.lock);
    all.living.insert(consumed);
    set_seal(made.get(), all.sealed);
    return c10::Storage(made);
}

bool is_one_of(const char *op, std::initializer_list<const char *> names) {
    return std::any_of(names.begin(), names.end(),
                       [op](const char *name) { return std::strcmp(op, name) == 0; });
}

// Operators that write all of their first argument and read nothing of it.
bool overwrites(const char *op) {
    return is_one_of(op, {"aten::zero_", "aten::fill_", "aten::copy_", "aten::normal_",
                          "aten::uniform_", "aten::_foreach_zero_", "aten::_foreach_copy_"});
}

bool reads_no_numbers(const char *op) {
    return makes_another(op) ||
           is_one_of(op, {"aten::detach_", "aten::requires_grad_", "optfuse::launch",
                          "optfuse::consume_by", "optfuse::are_consumed", "optfuse::complete",
                          "optfuse::lend"}); // know which are
}

// An alias, which is consumed, too. (A DTensor makes another one.)
bool makes_alias(const char *op, const c10::TensorImpl *impl) {
    return std::strcmp(op, "aten::detach") == 0 && !impl->key_set().has(c10::DispatchKey::Python);
}

// The operator that Module.to() and the like call on each gradient; aten::to() gives the same
// tensor, or goes on to aten::_to_copy.
bool moves(const char *op) {
    return std::strcmp(op, "aten::to") == 0 ||
           std::strcmp(op, "aten::_has_compatible_shallow_copy_type") == 0;
}

bool converts(const char *op) {
    return std::strcmp(op, "aten::_to_copy") == 0;
}

c10::Device with_index(const c10::Device &device) {
    if (device.has_index() || device.is_cpu() || device.is_meta())
        return device;
    return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

// As Python writes it: (), (3,), (3, 4).
std::string shape_of(const c10::TensorImpl *impl) {
    std::string shape;
    for (const auto size : impl->sizes())
        shape += (shape.empty() ? "" : ", ") + std::to_string(size);
    return "(" + shape + (impl->dim() == 1 ? ",)" : ")");
}

// The tensor that has the numbers of one: itself, or of a DTensor its local tensor.
c10::TensorImpl *local_of(c10::TensorImpl *impl) {
    const Wrapped *wrapped = wrapped_of(impl);
    return wrapped == nullptr ? impl : wrapped->local.unsafeGetTensorImpl();
}

// Whether no step() has come since.
bool is_unconfirmed(const c10::TensorImpl *impl) {
    const Consumed *consumed = consumed_of(impl);
    return consumed && consumed->steps->load(std::memory_order_acquire) ==
                           consumed->step.load(std::memory_order_relaxed);
}

// Such a DTensor is what it was before.
void unwrap(c10::TensorImpl *impl) {
    const Wrapped *wrapped = wrapped_of(impl);
    if (wrapped == nullptr)
        return;
    const c10::Storage before = wrapped->before;
    impl->set_storage_keep_dtype(before);
    unmark(impl);
}

// A consumed gradient and a tensor exchange their memory, and what one has in the place of it.
void exchange(const c10::TensorImpl *consumed, const c10::TensorImpl *tensor) {
    c10::StorageImpl *a = storage_of(consumed), *b = storage_of(tensor);
    const std::lock_guard<std::mutex> guard(all_consumed().lock);
    consumed_of(consumed)->storage = c10::weak_intrusive_ptr<c10::StorageImpl>(
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(b));
    std::swap(a->_mutable_data_ptr_no_checks(), b->_mutable_data_ptr_no_checks());
    const size_t bytes = a->nbytes();
    a->set_nbytes(b->nbytes());
    b->set_nbytes(bytes);
    const bool resizable = a->resizable(), sealed = is_sealed(a);
    a->set_resizable(b->resizable());
    b->set_resizable(resizable);
    set_seal(a, is_sealed(b));
    set_seal(b, sealed);
}

// Consumed gradients that an operator overwrites: they have memory from here on. Without keep()
// they are consumed again, as where the operator has failed.
class Overwriting : Pinned {
  public:
    ~Overwriting() {
        for (const auto &[gradient, before] : made)
            if (before.defined())
                exchange(before.unsafeGetTensorImpl(), local_of(gradient.unsafeGetTensorImpl()));
    }
    // Nothing, for what else is in a list: it may have no storage, and its mark is none of ours.
    void begin(const at::Tensor &gradient) {
        if (!is_consumed(gradient.unsafeGetTensorImpl()))
            return;
        at::Tensor memory;
        const c10::TensorImpl *impl = local_of(gradient.unsafeGetTensorImpl());
        if (consumed_of(impl) != nullptr) {
            const PlainMode plain;
            const auto like = at::TensorOptions().dtype(impl->dtype()).device(impl->device());
            memory = at::empty_strided(impl->sizes(), impl->strides(), like);
            exchange(impl, memory.unsafeGetTensorImpl());
        }
        made.emplace_back(gradient, memory);
    }
    void keep() {
        for (const auto &[gradient, before] : made) {
            unmark(local_of(gradient.unsafeGetTensorImpl()));
            unwrap(gradient.unsafeGetTensorImpl());
        }
        made.clear();
    }

  private:
    std::vector<std::pair<at::Tensor, at::Tensor>> made;
};

at::Tensor without_shape(const c10::Device &device, at::ScalarType dtype,
                         std::shared_ptr<const Steps> steps) {
    return at::detail::make_tensor<c10::TensorImpl>(
        consumed_storage(device, dtype, std::move(steps)),
        c10::DispatchKeySet(c10::computeDispatchKey(dtype, c10::kStrided, device)),
        c10::scalarTypeToTypeMeta(dtype));
}

} // namespace

at::Tensor make_consumed(const at::Tensor &param, std::shared_ptr<const Steps> steps) {
    at::Tensor consumed = without_shape(param.device(), param.scalar_type(), std::move(steps));
    // As autograd lays gradients out.
    if (param.is_non_overlapping_and_dense())
        consumed.unsafeGetTensorImpl()->set_sizes_and_strides(param.sizes(), param.strides());
    else
        consumed.unsafeGetTensorImpl()->set_sizes_contiguous(param.sizes());
    mark(consumed.unsafeGetTensorImpl());
    return consumed;
}

uint64_t consume_again(const c10::TensorImpl *impl) {
    static std::atomic<uint64_t> last{kNoUse};
    Consumed *consumed = consumed_of(impl);
    if (consumed == nullptr)
        return kNoUse;
    const uint64_t use = last.fetch_add(1, std::memory_order_relaxed) + 1;
    consumed->use.store(use, std::memory_order_relaxed);
    consumed->step.store(consumed->steps->load(std::memory_order_relaxed),
                         std::memory_order_relaxed);
    return use;
}

bool is_of_use(const c10::TensorImpl *impl, uint64_t use) {
    const Consumed *consumed = impl->has_storage() ? consumed_of(impl) : nullptr;
    return consumed != nullptr && consumed->use.load(std::memory_order_relaxed) == use &&
           impl->dtype() == consumed->dtype;
}

const at::Tensor &local_gradient(const at::Tensor &gradient) {
    const c10::TensorImpl *impl = gradient.unsafeGetTensorImpl();
    const Wrapped *wrapped = impl->has_storage() ? wrapped_of(impl) : nullptr;
    return wrapped == nullptr ? gradient : wrapped->local;
}

bool has_aliases(const c10::TensorImpl *impl) {
    c10::StorageImpl *storage = storage_of(impl);
    return c10::raw::intrusive_ptr::use_count(storage) > 1 + idle_references(*storage);
}

namespace {

// aten::_to_copy: its copy on another device or in another dtype is consumed, too.
void convert(const OperatorCall &call) {
    enum { SELF, DTYPE, LAYOUT, DEVICE, PIN_MEMORY, NON_BLOCKING, MEMORY_FORMAT, N };
    const at::Tensor self = call.argument(SELF).toTensor();
    const auto dtype =
        call.argument(DTYPE).toOptional<at::ScalarType>().value_or(self.scalar_type());
    const auto device = call.argument(DEVICE).toOptional<c10::Device>().value_or(self.device());
    const auto format = call.argument(MEMORY_FORMAT)
                            .toOptional<at::MemoryFormat>()
                            .value_or(at::MemoryFormat::Preserve);
    const Consumed *before = consumed_of(self.unsafeGetTensorImpl());
    at::Tensor consumed = without_shape(with_index(device), dtype, before->steps);
    c10::TensorImpl *impl = consumed.unsafeGetTensorImpl();
    auto &copy = *static_cast<Consumed *>(memory_of(impl).get_context());
    copy.step = before->step.load();
    copy.dtype = before->dtype;
    if (impl->device() == self.device() && c10::promoteTypes(before->dtype, dtype) == dtype)
        copy.use = before->use.load();
    impl->set_sizes_and_strides(self.sizes(), self.strides());
    if (format != at::MemoryFormat::Preserve)
        impl->empty_tensor_restride(format);
    mark(impl);
    torch::jit::drop(*call.stack, N);
    call.stack->push_back(std::move(consumed));
}

// zero_() and the like: what they write to has memory again, and so have its aliases.
void overwrite(const OperatorCall &call) {
    const c10::IValue target = call.argument(0);
    Overwriting overwriting;
    if (target.isTensor())
        overwriting.begin(target.toTensor());
    else
        for (const c10::IValue &element : target.toListRef())
            overwriting.begin(element.toTensor());
    call.go_on();
    overwriting.keep();
}

} // namespace

void seal_consumed(bool sealed) {
    AllConsumed &all = all_consumed();
    std::vector<c10::intrusive_ptr<c10::StorageImpl>> held; // may be the last: dropped unlocked
    const std::lock_guard<std::mutex> guard(all.lock);
    all.sealed = sealed;
    for (const Consumed *consumed : all.living) {
        held.push_back(consumed->storage.lock());
        if (held.back())
            set_seal(held.back().get(), sealed);
    }
}

bool consumed_are_sealed() {
    AllConsumed &all = all_consumed();
    const std::lock_guard<std::mutex> guard(all.lock);
    return all.sealed;
}

bool is_consumed(const c10::TensorImpl *impl) {
    return impl->has_storage() && (consumed_of(impl) != nullptr || wrapped_of(impl) != nullptr);
}

void consume_wrapper(const at::Tensor &wrapper, const at::Tensor &local) {
    c10::TensorImpl *impl = wrapper.unsafeGetTensorImpl();
    auto *wrapped = new Wrapped{local, impl->unsafe_storage()};
    impl->set_storage_keep_dtype(
        c10::Storage(c10::Storage::use_byte_size_t(), 0,
                     c10::DataPtr(nullptr, wrapped, free_wrapped, wrapper.device())));
    mark(impl);
}

namespace {

// Each of these has at most three lines: the mistake, and one or two ways out.
const char *const kForward = "optfuse.fuse(optimizer, mode=\"forward\")";
const char *const kMark = "inside `with optfuse.accumulate(optimizer):`";

[[noreturn]] void refuse_overwriting(const char *op, const c10::TensorImpl *impl) {
    fail("optfuse: " + find_caller().place + op +
         " would overwrite the gradient of a parameter of shape " + shape_of(impl) +
         " between backward() and step(), but backward fusion has already applied it.\n"
         "Overwrite it after step(), or run passes whose gradients are thrown away " +
         kMark + ".\nWhere gradients are changed before step(), use " + kForward);
}

// Autograd adds to the gradient that is there.
bool is_second_pass(const char *op) {
    return torch::autograd::get_current_graph_task_id() != -1 &&
           is_one_of(op, {"aten::add_", "aten::add"});
}

std::string way_out_of_second_pass(bool is_unconfirmed) {
    if (!is_unconfirmed)
        return std::string("OperatorCall zero_grad() between step() and the next backward(). Gradients "
                           "that add up over several steps need ") +
               kForward;
    return std::string("To accumulate, fuse with optfuse.Backward(accumulate=n), which counts n "
                       "passes a step; or run passes that only add, or whose gradients are thrown "
                       "away, ") +
           kMark + ".\nAny number of passes works with " + kForward;
}

std::string way_out_of_reading(const char *op) {
    const bool writes = op[std::strlen(op) - 1] == '_';
    return std::string("Gradients are there after backward() with ") + kForward +
           ".\nWhere none is needed any more, call zero_grad() after step()" +
           (writes ? "; to set one to zero by hand, call its zero_() then" : "");
}

[[noreturn]] void refuse_reading(const char *op, c10::TensorImpl *impl, bool is_target) {
    const bool raw = std::strcmp(op, "optfuse::access") == 0;
    const bool before_step = is_unconfirmed(local_of(impl));
    const bool adds = is_target && is_second_pass(op);
    const Caller caller = find_caller();
    std::string act = raw ? "an access to raw memory (such as data_ptr)" : op, way_out;
    if (adds) {
        act = before_step ? "a second backward() before step()"
                          : "backward() without zero_grad() after step()";
        way_out = way_out_of_second_pass(before_step);
    } else if (!caller.act.empty()) {
        act = caller.act + " (" + op + ")";
        way_out = caller.act + " needs all gradients after backward(): use " + kForward;
        way_out[0] = static_cast<char>(std::toupper(way_out[0]));
    } else {
        way_out = way_out_of_reading(op);
    }
    fail("optfuse: " + caller.place + act + (adds ? " would add to" : " read") +
         " the gradient of a parameter of shape " + shape_of(impl) +
         ", but backward fusion has already applied it and freed it.\n" + way_out);
}

Run answer_consumed(const char *op, c10::TensorImpl *impl, bool is_target) {
    if (is_target && overwrites(op)) {
        if (is_unconfirmed(local_of(impl)) && OF_GUARD(overwritten))
            refuse_overwriting(op, impl);
        return overwrite;
    }
    if (reads_no_numbers(op) || moves(op) || makes_alias(op, impl))
        return go_on;
    if (converts(op) && !impl->key_set().has(c10::DispatchKey::Python))
        return convert;
    refuse_reading(op, impl, is_target);
}

} // namespace

const Absent absent::consumed = {free_consumed, answer_consumed};
const Absent absent::wrapped = {free_wrapped, answer_consumed};

} // namespace optfuse
