// SPDX-License-Identifier: BSD-3-Clause
#include "recorded/forms.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_map>
#include <unordered_set>

namespace optfuse::recorded {
namespace {

using at::ScalarType;

// Larger numbers raise, or become infinite, by the dtype that they are converted to.
double most_of(ScalarType dtype) {
    return dtype == at::kHalf ? 65504.0 : dtype == at::kDouble ? 1.7e308 : 3.38e38;
}

// The largest number that a call has; infinite: one that no line may have.
struct Largest {
    double value = 0.0;

    void put(double x) {
        if (!std::isinf(x)) // these have a place in every dtype
            value = std::max(value, std::isnan(x) ? HUGE_VAL : std::fabs(x));
    }
    void put(int64_t x) {
        constexpr int64_t kExact = int64_t(1) << 53;
        put(x < -kExact || x > kExact ? NAN : static_cast<double>(x));
    }
    // False: it is no number.
    bool put(const c10::IValue &v) {
        if (v.isDouble())
            put(v.toDouble());
        else if (v.isInt())
            put(v.toInt());
        return v.isDouble() || v.isInt();
    }
};

// Whether operands have one form, beside which there may be some without dimensions.
struct Alike {
    const c10::TensorImpl *like = nullptr;
    Largest largest = {};

    bool put(const at::Tensor &tensor) {
        const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
        if (!tensor.defined() || !impl->is_contiguous())
            return false;
        if (impl->is_wrapped_number()) {
            if (impl->dtype().toScalarType() == at::kDouble)
                largest.put(*static_cast<const double *>(data_of(impl)));
            else if (impl->dtype().toScalarType() == at::kLong)
                largest.put(*static_cast<const int64_t *>(data_of(impl)));
            else
                return false;
            return true;
        }
        if (like == nullptr) {
            like = impl;
            return c10::isFloatingType(impl->dtype().toScalarType());
        }
        if (impl->dtype() != like->dtype() || impl->device() != like->device())
            return false;
        if (like->dim() == 0)
            like = impl;
        return impl->dim() == 0 || equal(impl->sizes(), like->sizes());
    }
    bool fits() const {
        return like != nullptr && largest.value <= most_of(like->dtype().toScalarType());
    }
    at::Tensor result(Tape *tape, const Known &k) const {
        const ScalarType dtype = k.compares ? at::kBool : like->dtype().toScalarType();
        return tape->absent(like->sizes(), {}, dtype, like->device());
    }
};

using Results = std::optional<std::vector<c10::IValue>>;

Results of_one(Tape *tape, const Known &k, const c10::IValue *args) {
    if (k.fills && args[1].isTensor() && args[1].toTensor().dim() != 0) // which raises
        return {};
    Alike alike;
    const c10::TensorImpl *operand = nullptr; // of the results' form
    for (size_t i = 0; i < k.n; i++) {
        const c10::IValue &v = args[i];
        const bool may_be = v.isTensor()   ? alike.put(v.toTensor())
                            : v.isNone()   ? true
                            : v.isBool()   ? !k.number[i]
                                           : k.number[i] && alike.largest.put(v);
        if (!may_be)
            return {};
        if (!k.has_out || i != k.target)
            operand = alike.like;
    }
    if (operand == nullptr || !alike.fits())
        return {};
    if (k.way == Way::WRITE)
        return args[k.target].toTensor().dim() == operand->dim() ? Results(std::in_place) : Results();
    Results made(std::in_place);
    made->emplace_back(alike.result(tape, k));
    return made;
}

Results of_lists(Tape *tape, const Known &k, const c10::IValue *args) {
    constexpr size_t kMost = 4;
    std::array<c10::ArrayRef<c10::IValue>, kMost> lists;
    size_t n_lists = 0;
    Alike beside; // the lists
    for (size_t i = 0; i < k.n; i++) {
        const c10::IValue &v = args[i];
        bool may_be;
        if (v.isTensorList()) {
            may_be = n_lists < kMost;
            if (may_be)
                lists[n_lists++] = v.toListRef();
        } else if (v.isList()) {
            const auto numbers = v.toListRef();
            may_be = std::all_of(numbers.begin(), numbers.end(),
                                 [&](const c10::IValue &x) { return beside.largest.put(x); });
            may_be &= n_lists != 0 && numbers.size() == lists[0].size();
        } else if (v.isTensor()) {
            may_be = beside.put(v.toTensor()) && v.toTensor().dim() == 0;
        } else {
            may_be = v.isNone() || (v.isBool() ? !k.number[i] : beside.largest.put(v));
        }
        if (!may_be)
            return {};
    }
    const size_t n = n_lists == 0 ? 0 : lists[0].size();
    const bool makes = k.way == Way::MAKE;
    c10::List<at::Tensor> made;
    if (makes)
        made.reserve(n);
    for (size_t place = 0; place < n; place++) {
        Alike alike;
        alike.largest = beside.largest;
        for (size_t i = 0; i < n_lists; i++)
            if (lists[i].size() != n || !alike.put(lists[i][place].toTensor()))
                return {};
        if (!alike.fits() || (!makes && lists[0][place].toTensor().dim() != alike.like->dim()) ||
            (beside.like != nullptr && (beside.like->dtype() != alike.like->dtype() ||
                                        beside.like->device() != alike.like->device())))
            return {};
        if (makes)
            made.push_back(alike.result(tape, k));
    }
    if (n == 0)
        return {};
    Results results(std::in_place);
    if (makes)
        results->emplace_back(std::move(made));
    return results;
}

struct Form {
    c10::SmallVector<int64_t, 4> sizes, strides;
    ScalarType dtype;
    c10::Device device;
};

struct Call {
    bool is_line = true, counts;
    std::vector<std::vector<Form>> results;
    std::vector<bool> is_list; // of each result
};

using Words = std::vector<int64_t>;
struct HashWords {
    size_t operator()(const Words &words) const {
        uint64_t h = 1469598103934665603ull;
        for (const int64_t word : words) {
            h = (h ^ static_cast<uint64_t>(word)) * 0x9E3779B97F4A7C15ull;
            h ^= h >> 29;
        }
        return h;
    }
};

// The calls that one thread has learned, and the one that it has looked up last.
struct Calls {
    std::unordered_map<Words, Call, HashWords> known;
    Words words;
    const Call *found = nullptr;
};
thread_local Calls calls;

enum : int64_t { kTensor, kNoTensor, kWrapped, kNone, kDouble, kInt, kBool, kDevice, kText, kList };

void put(const at::Tensor &tensor) {
    Words &words = calls.words;
    if (!tensor.defined()) {
        words.push_back(kNoTensor);
        return;
    }
    const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    const auto sizes = impl->sizes(), strides = impl->strides();
    words.push_back(impl->is_wrapped_number() ? kWrapped : kTensor);
    words.push_back(static_cast<int64_t>(sizes.size()) << 24 |
                    static_cast<int64_t>(impl->dtype().toScalarType()) << 16 |
                    static_cast<int64_t>(impl->device().type()) << 8 |
                    (impl->device().index() + 1));
    words.insert(words.end(), sizes.begin(), sizes.end());
    words.insert(words.end(), strides.begin(), strides.end());
}

// False: it can't be told.
bool put(const c10::IValue &v, bool is_number) {
    Words &words = calls.words;
    if (v.isTensor()) {
        // Integers can make an operator fail by their values.
        if (v.toTensor().defined() && !v.toTensor().unsafeGetTensorImpl()->is_wrapped_number() &&
            c10::isIntegralType(v.toTensor().scalar_type(), false))
            return false;
        put(v.toTensor());
    } else if (v.isNone()) {
        words.push_back(kNone);
    } else if (v.isDouble() || v.isInt()) {
        words.push_back(v.isDouble() ? kDouble : kInt);
        Largest largest;
        largest.put(v);
        if (is_number)
            return largest.value <= most_of(at::kHalf);
        if (v.isDouble())
            return false;
        words.push_back(v.toInt());
    } else if (v.isBool()) {
        words.insert(words.end(), {kBool, v.toBool()});
    } else if (v.isDevice()) {
        const c10::Device device = v.toDevice();
        if (is_gpu(device) && !device.has_index()) // the current one
            return false;
        words.insert(words.end(), {kDevice, static_cast<int64_t>(device.type()), device.index()});
    } else if (v.isString()) {
        words.insert(words.end(), {kText, static_cast<int64_t>(v.toStringRef().size())});
        for (const char c : v.toStringRef())
            words.push_back(c);
    } else if (v.isList()) {
        const auto elements = v.toListRef();
        words.insert(words.end(), {kList, static_cast<int64_t>(elements.size())});
        return std::all_of(elements.begin(), elements.end(),
                           [&](const c10::IValue &x) { return put(x, is_number); });
    } else {
        return false;
    }
    return true;
}

Form form_of(const at::Tensor &t) {
    return {{t.sizes().begin(), t.sizes().end()},
            {t.strides().begin(), t.strides().end()},
            t.scalar_type(),
            t.device()};
}

bool is_plain_result(const at::Tensor &t) {
    return t.has_storage() && t.layout() == at::kStrided && t.storage_offset() == 0 &&
           !t.unsafeGetTensorImpl()->is_python_dispatch() && !t.is_conj() && !t.is_neg() &&
           !t.unsafeGetTensorImpl()->is_wrapped_number();
}

} // namespace

Results forms_by_rule(Tape *tape, const Known &k, const c10::IValue *args) {
    return k.of_lists ? of_lists(tape, k, args) : of_one(tape, k, args);
}

bool Learned::look_up(const Known &k, const c10::IValue *args) {
    if (k.has_out) // it might get another form
        return false;
    calls.words = {reinterpret_cast<int64_t>(&k),
                   static_cast<int64_t>(c10::get_default_dtype_as_scalartype())};
    for (size_t i = 0; i < k.n; i++)
        if (!put(args[i], k.number[i]))
            return false;
    const auto found = calls.known.find(calls.words);
    calls.found = found == calls.known.end() ? nullptr : &found->second;
    return true;
}

bool Learned::is_known() { return calls.found != nullptr; }

bool Learned::is_line() { return calls.found->is_line; }

bool Learned::counts() { return calls.found->counts; }

std::vector<c10::IValue> Learned::results(Tape *tape) {
    const Call &call = *calls.found;
    const auto make = [tape](const Form &f) {
        return tape->absent(f.sizes, f.strides, f.dtype, f.device);
    };
    std::vector<c10::IValue> results;
    for (size_t i = 0; i < call.results.size(); i++) {
        if (!call.is_list[i]) {
            results.emplace_back(make(call.results[i][0]));
            continue;
        }
        c10::List<at::Tensor> made;
        for (const Form &f : call.results[i])
            made.push_back(make(f));
        results.emplace_back(std::move(made));
    }
    return results;
}

void Learned::learn(const Known &k, const std::vector<c10::IValue> &args,
                    const c10::IValue *results, size_t n_results, bool counts) {
    Call call;
    call.counts = counts;
    std::unordered_set<const c10::StorageImpl *> given; // results that share memory are no line's
    c10::Device device = c10::kCPU;                     // nor those on another device
    each_tensor(args.data(), args.size(), [&](const at::Tensor &tensor) {
        given.insert(storage_of(tensor.unsafeGetTensorImpl()));
        if (!tensor.is_cpu())
            device = tensor.device();
        return true;
    });
    if (given.empty() && n_results == 1 && results[0].isTensor())
        device = results[0].toTensor().device();
    for (size_t i = 0; i < n_results && k.way == Way::MAKE; i++) {
        call.is_list.push_back(results[i].isList());
        std::vector<Form> &forms = call.results.emplace_back();
        call.is_line &= results[i].isTensor() || results[i].isTensorList();
        each_tensor(results[i], [&](const at::Tensor &tensor) {
            call.is_line &= is_plain_result(tensor) && tensor.device() == device &&
                            given.insert(storage_of(tensor.unsafeGetTensorImpl())).second;
            forms.push_back(form_of(tensor));
            return true;
        });
        call.is_line &= !forms.empty() && (results[i].isList() || forms.size() == 1);
    }
    calls.known.emplace(std::move(calls.words), std::move(call));
}

} // namespace optfuse::recorded
