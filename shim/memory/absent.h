// SPDX-License-Identifier: BSD-3-Clause
// absent.h: numbers that a tensor's memory does not have. Either the memory is absent: the gradient is
// consumed or promised, the tensor recorded; that is known by the deleter of what stands in the place
// of the memory. Or the numbers are late: on their way from other processes, say, which a table of
// storages knows; those of pending updates and scalings are in the core's table (of_access()). Such a
// tensor has the mark, so that operators come to host/first_use.cpp, which asks its kind here.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/TensorImpl.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "base/compat.h"
#include "fence.h"
#include "optfuse.h"

namespace optfuse {

// An operator of which some tensor has the mark.
struct OperatorCall {
    const c10::OperatorHandle &op;
    const c10::DispatchKeySet keys;
    torch::jit::Stack *const stack;

    const char *name() const { return op.schema().operator_name().name.c_str(); }
    size_t n() const { return op.schema().arguments().size(); }
    const c10::IValue &argument(size_t i) const { return torch::jit::peek(*stack, i, n()); }
    // As if no tensor had the mark.
    void go_on() const {
        op.redispatchBoxed(
            keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kPendingKey), stack);
    }
};

// How an operator runs that needs no numbers of its tensor.
using Run = void (*)(const OperatorCall &call);
inline void go_on(const OperatorCall &call) { call.go_on(); }

constexpr double kRounding = 0x1p-24; // of float32, at most, beside a number of 1
// At most so many times the exact number is one that has passed n roundings: exp(n kRounding), by a
// function that the oldest C library has, too.
inline double most_rounded_up(double n) { return 1 + std::expm1(n * kRounding); }

// Numbers of float32 that are absent. Any thread can compute them at any time.
class Computable {
  public:
    virtual ~Computable() = default;
    virtual size_t numel() const = 0;
    // Their 2-norm is at most this; infinite or NaN: nobody knows.
    virtual double most_norm() const { return std::numeric_limits<double>::infinity(); }
    virtual void compute_all(void *out) const = 0; // throws
};

// One kind of them. Functions may be null.
struct Absent {
    c10::DeleterFnPtr deleter; // of what stands in the memory's place; null: the numbers are late
    // The operator's answer where it gets this tensor; null: it needs the numbers. Throws where there
    // are none. is_target: the tensor is the operator's first argument, or in it.
    Run (*answer)(const char *op, c10::TensorImpl *impl, bool is_target) = nullptr;
    // The numbers are there afterwards. False after of_set_error(). No lock of a plan is held.
    bool (*make)(c10::StorageImpl *storage) = nullptr;
    // Has an update make them itself, by parts, without memory. False: they are there meanwhile.
    bool (*update)(const c10::StorageImpl *storage, of_inputs *in) = nullptr;
    // Whether it has run the operator in its own way: before any tensor is asked for, and when all
    // numbers are there.
    bool (*begin)(const OperatorCall &call) = nullptr;
    bool (*end)(const OperatorCall &call) = nullptr;
    // All numbers of the tensor; null: they are of another dtype, or there meanwhile.
    std::shared_ptr<const Computable> (*computable)(const c10::TensorImpl *impl) = nullptr;
};

// All kinds, in the order in which they are asked: set once, before there is any such tensor
// (doors/start.cpp). Leaked: tensors may be used after destructors have run.
extern std::vector<const Absent *> &absent_kinds;

// That of the memory which PyTorch's allocator for the CPU gives.
[[gnu::visibility("hidden")]] extern const c10::DeleterFnPtr cpu_deleter;
const Absent *absent_by(c10::DeleterFnPtr deleter);
// The kind, if the memory is absent; else null. Most memory is the CPU's.
inline const Absent *absent_of(const c10::StorageImpl *storage) {
    const c10::DeleterFnPtr deleter = data_ptr_of(storage).get_deleter();
    return deleter == cpu_deleter ? nullptr : absent_by(deleter);
}
// A tensor whose numbers are of the kind with this deleter, marked and sealed. strides: none of a
// contiguous one.
at::Tensor make_absent(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                       c10::Device device, void *context, c10::DeleterFnPtr deleter);
inline bool is_absent(const c10::TensorImpl *impl) {
    return impl->has_storage() &&
           absent_of(impl->unsafe_storage().unsafeGetStorageImpl()) != nullptr;
}
// Absent::make(), where memory is absent that can be made.
bool make_memory(c10::StorageImpl *storage);
// The same of a gradient, for what reads its memory. Throws.
void compute_now(const c10::TensorImpl *gradient);
// Whether the operator makes a tensor like one, and reads nothing of that.
bool makes_another(const char *op);

// How many want marks to stay now behind which nothing is pending (absent/recomputed.cpp).
extern std::atomic<int> marks_wanted;
inline bool are_marks_wanted() { return marks_wanted.load(std::memory_order_relaxed) != 0; }
inline bool marks_stay() { return of_marks_stay() || are_marks_wanted(); }

} // namespace optfuse
