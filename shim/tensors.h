// SPDX-License-Identifier: BSD-3-Clause
// tensors.h: the shim's own data. A Plan holds one Slot per parameter; References
// carry the references of one update from collect() to release().
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <pthread.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "autograd/heap.h"
#include "error.h"
#include "external/native.h"
#include "optfuse.h"
#include "shim.h"

namespace optfuse {

struct Plan;

// Dtype and device of a parameter in one number, as _place_of() of _gpu.py; or that every
// place will do.
constexpr int64_t ANYWHERE = -1;
int64_t place_of(const c10::TensorImpl *p, of_dtype dtype);

struct Slot {
    Plan *plan = nullptr;
    size_t index = 0;
    size_t group = 0;
    std::string label; // how errors name the parameter
    // Borrowed: the loader keeps the parameter alive as long as the slot. A
    // reference from here would hide a cycle (parameter -> Python attribute or
    // hook -> optimizer) from Python's garbage collector, and even a weak one
    // makes torch.utils.swap_tensors refuse the parameter.
    c10::TensorImpl *param;
    at::Tensor state[OF_MAX_STATE];
    at::Tensor step;    // 0-dim tensor that counts updates, on the CPU or the
                        // parameter's device, or undefined
    at::Tensor counters[OF_MAX_COUNTERS]; // the rule's other 0-dim state, on the CPU or, if
                                          // of_rule.counts_on_gpu, the parameter's GPU
    // Rules without kernels: all state tensors, in the class's order if the rule has
    // a native update; and whether these are all that an update changes beside the
    // parameter and the gradient, so that it can wait.
    std::vector<at::Tensor> own;
    bool can_wait = false;
    // The place for which what updates there has been tried, where that is needed: on GPUs,
    // and of Plan::tried_on_cpu everywhere. Module.to() brings the parameter to another one
    // without anybody being told.
    int64_t tried = ANYWHERE;
    bool first = false; // rules without a counter: the next update is the first
    at::Tensor consumed; // backward mode: what .grad becomes

    explicit Slot(const at::Tensor &tensor) : param(tensor.unsafeGetTensorImpl()) {}
};

enum { FACTOR = 3 }; // of References::scalars

struct References {
    Slot *slot = nullptr;
    // The update runs inside backward, and the gradient is replaced after it. What
    // step() updates keeps its gradient, as in stock.
    bool consumes = false;
    bool committed = false; // an update that is not is only released
    size_t n = 0; // tensors that take part: parameter, gradient, state
    c10::TensorImpl *tensors[OF_MAX_KEYS]; // marked by defer(), valid until then only
    c10::intrusive_ptr<c10::StorageImpl> storages[OF_MAX_KEYS];
    // A deferred scaling: the gradient's memory, which may be freed meanwhile.
    c10::weak_intrusive_ptr<c10::StorageImpl> gradient{c10::intrusive_ptr<c10::StorageImpl>()};
    c10::TensorImpl *grad = nullptr; // the gradient to be replaced
    at::Tensor param;                // if it consumes or is alone
    at::Tensor copy;                 // a gradient in the parameter's strides
    at::Tensor old_grad, old_consumed;  // replaced by settle(), dropped by release()
    // Not dense: {tensor, dense copy to compute with}. The first n_written are
    // written back after the update.
    std::vector<std::pair<at::Tensor, at::Tensor>> stand_ins;
    size_t n_written = 0;
    // Rules without kernels: the gradient, which may have left .grad before the
    // update runs; whether gradients were on; and whether the thread had modes that
    // the update must run under, as in stock.
    at::Tensor held_grad;
    bool grad_mode = true;
    bool as_is = false;
    bool on_gpu = false;
    of_stream stream = {};  // on a GPU: where the update runs if it was deferred,
    of_stream ready = {};   // and if not
    at::Tensor scalars[4];  // device scalars that it reads: copies, and the factor
};

// Scalars of this step that live on a GPU: learning rates, the loss scale and
// whether a gradient overflowed; and the factor of the clipping under way. An update
// that runs later reads a copy, which nobody rewrites.
class DeviceScalars {
  public:
    // lr: one for each group, undefined where it is a number.
    void set(std::vector<at::Tensor> lr, at::Tensor grad_scale, at::Tensor found_inf);
    bool scale_gradients() const { return grad_scale.defined() || found_inf.defined(); }
    // Whether updates write the gradients that they have divided.
    bool divide_gradients() const { return grad_scale.defined(); }
    // Fills in the addresses and the references that keep them valid.
    void give(size_t group, of_inputs *in, References *refs);
    // A 0-dim tensor that nobody writes to any more, or an undefined one.
    void set_factor(at::Tensor by);
    // Whether it is of this dtype. PyTorch's operators differ in how they round one
    // of another dtype, and are left to do so.
    bool has_factor(at::ScalarType dtype) const {
        return factor.defined() && factor.scalar_type() == dtype;
    }
    void give_factor(of_inputs *in, References *refs);

  private:
    struct Copy {
        const c10::TensorImpl *of;
        of_stream stream; // on which it was made
        at::Tensor copy;
    };
    const float *copy_of(const at::Tensor &scalar, const of_stream &stream, at::Tensor *keep);
    bool any = false;
    std::vector<at::Tensor> lr;
    at::Tensor grad_scale, found_inf, factor;
    std::mutex lock; // guards copies: gradient hooks of two devices may come at once
    std::vector<Copy> copies;
    // The factor in the type of the computation, on the devices that have asked for it.
    std::vector<std::pair<of_stream, at::Tensor>> factors;
};

// of_shim_plan is a Plan. Gradient hooks share it, so that it and its core
// outlive them; `self` is the loader's share.
struct Plan {
    ~Plan() {
        of_plan_release(core);
        if (uses_heap.load(std::memory_order_relaxed))
            of_heap_leave();
    }
    std::shared_ptr<Plan> self;
    of_plan *core = nullptr;
    of_mode mode = OF_FORWARD;
    const of_rule *rule = nullptr;
    NativeUpdate *native = nullptr; // rules without kernels: or Python updates
    std::vector<Slot *> slots;     // owned by the core, in its order
    std::atomic<bool> closed{false};
    std::atomic<size_t> backwards{0};   // that did not only add
    std::atomic<bool> uses_heap{false}; // heap.h
    // The thread that called step() last: the one that may take marks off the
    // plan's tensors other than at their use.
    std::atomic<pthread_t> stepping{};
    DeviceScalars scalars;
    std::vector<at::Tensor> dying; // empty: room for what zero_grad() lets go
    bool beside = false; // backward mode, on GPUs: updates go on a side stream
    int64_t tried_on_cpu = 0; // bit dtype: this release may round otherwise than our update
    // Bit dtype * 8 + state in use: these kernels have been loaded for a GPU.
    std::atomic<uint32_t> prepared[64] = {};
    // Bit dtype: those that multiply gradients have been.
    std::atomic<uint32_t> prepared_scaling[64] = {};
};

// Whether this is a moment when marks may be taken off other tensors than the one that is used.
bool may_take_marks_off(const Plan *plan);

inline Plan *plan_of(of_shim_plan *handle) { return reinterpret_cast<Plan *>(handle); }
inline of_shim_plan *handle_of(Plan *plan) { return reinterpret_cast<of_shim_plan *>(plan); }

// Our own tensor operations must not be seen by the user's modes: no autograd,
// no Python dispatch, no functorch, no autocast, no inference mode.
struct PlainMode {
    c10::InferenceMode normal{false};
    c10::AutoGradMode no_grad{false};
    c10::impl::ExcludeDispatchKeyGuard no_modes{
        c10::python_ks | c10::functorch_transforms_ks | c10::autocast_dispatch_keyset |
        c10::autograd_dispatch_keyset_with_ADInplaceOrView};
};

// refuse.cpp: whether there is a kernel for it
bool dtype_of(const c10::TensorImpl *impl, of_dtype *out);
// OF_FOUND_ERROR and the message, or OF_FOUND_INPUTS
of_found refuse(const Slot *slot, const char *which, const char *what, const std::string &detail);
// In-place updates of inference tensors are allowed in inference mode only.
bool is_frozen_inference(const c10::TensorImpl *impl);
of_found refuse_frozen(const Slot *slot, const char *which);
of_found check_param(const Slot *slot, const c10::TensorImpl *p, of_dtype *dtype);
bool is_tried(const Slot *slot, const c10::TensorImpl *p, of_dtype dtype);
of_found check_tried(const Slot *slot, const c10::TensorImpl *p, of_dtype dtype);
of_found check_gradient(const Slot *slot, const c10::TensorImpl *p, const c10::TensorImpl *g);
of_found check_state(const Slot *slot, const c10::TensorImpl *p, const c10::TensorImpl *s);
of_found check_step(const Slot *slot, const c10::TensorImpl *p);
// Elements are not what memory holds: negated or zero by a flag, and resolved
// only by PyTorch's own operators.
bool is_lazy(const c10::TensorImpl *impl);

// collect.cpp
of_found collect(void *ctx, void *tensor, of_inputs *in);
void take_part(References *refs, of_inputs *in, c10::TensorImpl *impl);
at::Tensor reference_to(c10::TensorImpl *impl);
// Another optimizer's update of the same memory must be done before it is
// judged and used. Nothing is pending behind most marks.
void launch_others(const c10::TensorImpl *impl, decltype(&of_access) launch = of_access);

// prefetch.cpp
void prefetch(void *ctx, void *const *tensors, size_t n);

// apply.cpp: rules without kernels
of_found fill_in_own(Slot *slot, c10::TensorImpl *p, const at::Tensor &grad, of_inputs *in,
                     References *refs);
extern const of_external_host external_host;

// scale.cpp
struct GradientOf {
    Plan *plan;
    Slot *slot;
    const at::Tensor &grad() const { return slot->param->grad(); }
};
// Multiplies a gradient, when it is next read, by a 0-dim tensor whose value is
// `number`; norm: of the result, NaN if not known. False: it can't be left pending.
bool scale_later(const GradientOf &of, double number, float norm);
void scale_one(const GradientOf &of, double number, float norm, const at::Tensor &factor);
// All of them; on a GPU the host does not wait for the factor's value.
void scale_all(const std::vector<GradientOf> &of, const at::Tensor &factor);
extern const of_scaling_host scaling_host;

// norm.cpp
// The 2-norms of gradients, of the dtype PyTorch gives them; none if one of the
// gradients can't be read here.
std::optional<at::Tensor> norms(const std::vector<GradientOf> &of);
// scale_one() of all, with their norms, and whether all were finite before; none,
// with nothing changed, if one of them can't be read here or has a factor.
std::optional<bool> unscale(const std::vector<GradientOf> &of, const at::Tensor &factor);
at::Tensor norm_by_our_formula(const at::Tensor &x); // contiguous float32

// roots.cpp: square roots with the bits of PyTorch's operator. n values of
// float32; of float64.
void square_roots_of_floats(void *values, size_t n);
void square_roots_of_doubles(void *values, size_t n);
// As long as one exists MKL opens no parallel region of its own on this thread.
class MklAlone {
  public:
    MklAlone();
    ~MklAlone();
    MklAlone(const MklAlone &) = delete;
    MklAlone &operator=(const MklAlone &) = delete;

  private:
    const bool outermost;
    int before = 0; // what the user's own calls of MKL have on this thread
};

// host.cpp
of_host make_host(Plan *plan);
// What an update or scaling on a GPU holds is used there later than its owner may think.
void record_all(References *refs);
// The CPU reference that this build of ATen computes with.
void fill_reference(of_plan_options *options);

// first_use.cpp
int register_first_use();
bool called_by_engine();
bool called_by_stranger(); // neither a thread that steps nor one of the engine's
void note_stepping_thread();

// gpu.cpp: the part of collect() that concerns a GPU
of_found prepare_gpu(Slot *slot, const c10::TensorImpl *p, of_dtype dtype);
// Whether the kernels that multiply gradients of this dtype are loaded now.
bool prepare_scaling(Plan *plan, const c10::Device &device, of_dtype dtype);
bool step_is_on_gpu(const Slot *slot);
// The rule's counters have to be there, too.
bool counts_on_gpu(const Slot *slot);
// The device, its stream and scalars; or why it can't be there.
of_found place(Slot *slot, const c10::TensorImpl *p, of_inputs *in, References *refs);

// consumed.cpp
at::Tensor make_consumed(const at::Tensor &param);
// Whether C++ code that asks for the address of one gets an error, or a null pointer.
void seal_consumed(bool sealed);
bool is_consumed(const c10::TensorImpl *impl);
// Answers an operator that received a consumed gradient: real zeros for zero_(), an error for
// what reads numbers. True: convert_consumed() gives its result.
bool answer_consumed(const char *op, c10::TensorImpl *impl);
// aten::_to_copy: on another device or of another dtype it is consumed, too.
void convert_consumed(torch::jit::Stack *stack);

// backward.cpp
bool is_closed(const Plan *plan);
// A parameter's gradient is complete.
void gradient_is_complete(const std::shared_ptr<Plan> &plan, size_t slot, const at::Tensor &param);
// collect()'s part inside backward: OF_FOUND_INPUTS, or what it returns.
of_found look_in_backward(const Slot *slot, c10::TensorImpl *p, const at::Tensor &grad);
extern const of_backward_host backward_host;

// gradient_hook.cpp
void attach_gradient_hook(const std::shared_ptr<Plan> &plan, Slot *slot, const at::Tensor &param);
void detach_gradient_hook(const Plan *plan, const at::Tensor &param);
bool lost_gradient_hook(const Plan *plan, const Slot *slot);
bool has_other_gradient_hook(const Plan *plan, const at::Tensor &param);

// callback.cpp
void set_callback(_object *callable);
// Whether it was done, or what a pass is, as shim.h says; 0 if it failed: why is in
// of_error_message(), and in raised_in_python if it is to arrive as another type than
// optfuse.Error.
int ask_python(Plan *plan, of_shim_event event, size_t slot);
extern thread_local _object *raised_in_python;

} // namespace optfuse
