// SPDX-License-Identifier: BSD-3-Clause
#include "recorded/translate.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/parallel.h"
#include "base/threads.h"

namespace optfuse::recorded {
namespace {

template <typename T> T at_start_of(const c10::TensorImpl *impl) {
    T x;
    std::memcpy(&x, data_of(impl), sizeof x);
    return x;
}

double value_of(const c10::TensorImpl *impl) {
    switch (impl->dtype().toScalarType()) {
    case at::kDouble:
        return at_start_of<double>(impl);
    case at::kFloat:
        return at_start_of<float>(impl);
    case at::kHalf:
        return at_start_of<at::Half>(impl);
    case at::kBFloat16:
        return at_start_of<at::BFloat16>(impl);
    case at::kBool:
        return at_start_of<bool>(impl);
    default:
        return static_cast<double>(at_start_of<int64_t>(impl));
    }
}

double value_of(const c10::IValue &value) {
    if (value.isTensor())
        return value_of(value.toTensor().unsafeGetTensorImpl());
    if (value.isDouble())
        return value.toDouble();
    return value.isInt() ? static_cast<double>(value.toInt()) : value.toBool();
}

constexpr std::pair<std::string_view, of_operator> kUnary[] = {
    {"neg", OF_OPERATOR_neg},     {"abs", OF_OPERATOR_abs},     {"sign", OF_OPERATOR_sign},
    {"sqrt", OF_OPERATOR_sqrt},   {"rsqrt", OF_OPERATOR_rsqrt}, {"reciprocal", OF_OPERATOR_reciprocal},
    {"clone", OF_OPERATOR_copy}};

constexpr std::pair<std::string_view, of_operator> kComparisons[] = {
    {"gt", OF_OPERATOR_gt}, {"ge", OF_OPERATOR_ge}, {"lt", OF_OPERATOR_lt},
    {"le", OF_OPERATOR_le}, {"eq", OF_OPERATOR_eq}, {"ne", OF_OPERATOR_ne}};
static_assert(OF_OPERATOR_ne_number - OF_OPERATOR_gt_number == OF_OPERATOR_ne - OF_OPERATOR_gt);

constexpr std::pair<double, of_operator> kPowers[] = {
    {2.0, OF_OPERATOR_square},       {3.0, OF_OPERATOR_cube}, {0.5, OF_OPERATOR_sqrt},
    {-0.5, OF_OPERATOR_rsqrt},       {1.0, OF_OPERATOR_copy}, {-1.0, OF_OPERATOR_reciprocal},
    {-2.0, OF_OPERATOR_invsquare}};

template <typename Key, size_t n>
std::optional<of_operator> found_in(const std::pair<Key, of_operator> (&table)[n], Key key) {
    for (const auto &[its, operation] : table)
        if (its == key)
            return operation;
    return {};
}

// One line at one place. A function that returns false has found that no instruction does the same.
class Translation {
  public:
    Translation(const Line &the_line, uint32_t the_place, const std::vector<c10::IValue> &all,
                const Numbered &its)
        : line(the_line), place(the_place), values(all), numbered(its),
          n(the_line.results - the_line.first - (the_line.known->has_out ? 1 : 0)), name(the_line.known->name) {}

    std::vector<Instruction> run() {
        const c10::IValue to = item(line.known->way == Way::MAKE ? n : line.known->target);
        if (!to.isTensor() || !to.toTensor().defined())
            return {};
        like = to.toTensor().unsafeGetTensorImpl();
        made.is_point = is_point = like->dim() == 0;
        made.to = numbered.of(to.toTensor());
        if (is_bool(like)) { // of what is compared, if anything is
            is_of_masks = !line.known->compares && name != "isnan";
            if (!is_of_masks && is_tensor(0))
                like = item(0).toTensor().unsafeGetTensorImpl();
        }
        made.dtype = like->dtype().toScalarType();
        made.device = like->device();
        const bool may_be = (is_of_masks || dtype_of(made.dtype)) && has_place() &&
                            (like->is_cpu() || like->dim() != 0) &&
                            like->is_non_overlapping_and_dense() &&
                            equal(like->sizes(), to.toTensor().sizes()) &&
                            equal(like->strides(), to.toTensor().strides());
        if (!may_be || !(is_of_masks ? of_masks() : by_name() || with_masks()) || !has_its_bits())
            return {};
        std::vector<Instruction> all = {made};
        if (second) {
            second->to = second->from[0] = made.to;
            second->n_from = 1;
            second->dtype = made.dtype;
            second->device = made.device;
            all.push_back(*second);
        }
        return all;
    }

  private:
    bool is_on_gpu() const { return !like->is_cpu(); }

    // Lists of several dtypes PyTorch's operators for GPUs take one by one, which rounds otherwise.
    bool has_place() const {
        return !is_on_gpu() || !line.known->of_lists ||
               like->dtype() == values[line.first].toListRef()[0].toTensor().dtype();
    }

    bool is_narrow() const { return like->dtype().itemsize() == 2; }

    // An argument, from n on a result; of a list the element at the place.
    c10::IValue item(size_t i) const {
        const c10::IValue &value = values[line.first + i];
        return value.isList() ? value.toListRef()[place] : value;
    }
    bool has(size_t i) const { return i < n && !values[line.first + i].isNone(); }

    // Beside others a tensor without dimensions is a number.
    bool is_operand(const at::Tensor &tensor) const {
        return tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number() &&
               (is_point || tensor.dim() != 0);
    }

    static bool is_bool(const c10::TensorImpl *impl) {
        return impl->dtype().toScalarType() == at::kBool;
    }
    bool is_mask(size_t i) const {
        return is_tensor(i) && is_bool(item(i).toTensor().unsafeGetTensorImpl());
    }

    bool take(size_t i, bool takes_mask = false) {
        const c10::IValue value = i < n ? item(i) : c10::IValue();
        if (!value.isTensor() || !is_operand(value.toTensor()))
            return false;
        const c10::TensorImpl *impl = value.toTensor().unsafeGetTensorImpl();
        made.from[made.n_from++] = numbered.of(value.toTensor());
        return (impl->dtype() == like->dtype() || (takes_mask && is_bool(impl))) && impl->device() == like->device() &&
               equal(impl->sizes(), like->sizes()) && equal(impl->strides(), like->strides());
    }

    bool is_tensor(size_t i) const {
        return i < n && item(i).isTensor() && is_operand(item(i).toTensor());
    }

    // A number, or a tensor without dimensions.
    bool take_number(size_t i, Number *to, double factor = 1.0) {
        const c10::IValue value = i < n ? item(i) : c10::IValue();
        *to = {factor, line.first + static_cast<uint32_t>(i),
               values[line.first + i].isList() ? place : Number::kNone};
        if (value.isDouble() || value.isInt())
            return true;
        if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().dim() != 0 ||
            !value.toTensor().is_cpu())
            return false;
        const c10::TensorImpl *impl = value.toTensor().unsafeGetTensorImpl();
        if (impl->is_wrapped_number())
            return impl->dtype().toScalarType() == at::kDouble ||
                   impl->dtype().toScalarType() == at::kLong;
        made.read[made.n_read++] = numbered.of(value.toTensor());
        made.of_number = impl->dtype().toScalarType();
        return c10::isFloatingType(impl->dtype().toScalarType());
    }

    // Numbers of which only some values have an instruction, by which schedules differ.
    std::optional<double> known_number(size_t i, double otherwise) const {
        if (!has(i))
            return otherwise;
        const c10::IValue value = item(i);
        if (value.isDouble() || value.isInt())
            return value_of(value);
        return {};
    }

    bool is(of_operator operation) {
        made.operation = is_on_gpu() && line.known->of_lists ? of_lists(operation) : operation;
        return true;
    }

    // On GPUs some operators on lists round otherwise than those on one tensor.
    of_operator of_lists(of_operator operation) const {
        if (operation == OF_OPERATOR_div_number && values[line.first + 1].isList())
            return OF_OPERATOR_div_number_list;
        return operation == OF_OPERATOR_maximum   ? OF_OPERATOR_maximum_list
               : operation == OF_OPERATOR_minimum ? OF_OPERATOR_minimum_list
                                                  : operation;
    }

    bool by_name() {
        if (const auto operation = found_in<std::string_view>(kUnary, name))
            return take(0) && !has(1) && is(*operation);
        if (name == "mul" && (is_mask(0) || is_mask(1)))
            return take(0, true) && take(1, true) && is(OF_OPERATOR_mul);
        if (name == "mul")
            return product(OF_OPERATOR_mul, OF_OPERATOR_mul_number, OF_OPERATOR_mul_number);
        if (name == "div")
            return !has(2) && product(OF_OPERATOR_div, OF_OPERATOR_div_number, OF_OPERATOR_number_div);
        if (name == "add" || name == "sub")
            return sum(0, 1, name == "add" ? 1.0 : -1.0);
        if (name == "rsub")
            return sum(1, 0, -1.0);
        if (name == "addcmul" || name == "addcdiv")
            return take(0) && take(1) && take(2) && is(name == "addcmul" ? OF_OPERATOR_addcmul : OF_OPERATOR_addcdiv) && take_number(3, &made.s) && made.n_read == 0;
        if (name == "lerp")
            return take(0) && take(1) && take_number(2, &made.s) && made.n_read == 0 &&
                   is(OF_OPERATOR_lerp);
        if (name == "pow")
            return power();
        if (name == "maximum" || name == "minimum")
            return is_tensor(1) ? take(0) && take(1) && is(name == "maximum" ? OF_OPERATOR_maximum : OF_OPERATOR_minimum)
                                : bound(1, name == "maximum");
        if (name == "clamp_min" || name == "clamp_max")
            return is_tensor(1) ? take(0) && take(1) && is(name == "clamp_min" ? OF_OPERATOR_maximum : OF_OPERATOR_minimum)
                                : bound(1, name == "clamp_min");
        if (name == "clamp")
            return clamp();
        if (name == "zero" || name == "zeros_like" || name == "ones_like") {
            made.s = {name == "ones_like" ? 1.0 : 0.0};
            return is(OF_OPERATOR_fill);
        }
        if (name == "fill" || name == "full_like")
            return is(OF_OPERATOR_fill) && take_number(1, &made.s) && made.n_read == 0;
        return name == "copy" && take(1) && is(OF_OPERATOR_copy);
    }

    // Operators between which and those above there are booleans.
    bool with_masks() {
        const auto comparison = found_in<std::string_view>(kComparisons, name);
        if (comparison && is_tensor(1))
            return take(0) && take(1) && is(*comparison);
        if (comparison) // the same with a number follows in operators.def
            return take(0) && take_number(1, &made.s) && made.n_read == 0 &&
                   is(static_cast<of_operator>(*comparison + OF_OPERATOR_gt_number - OF_OPERATOR_gt));
        if (name == "isnan") {
            return take(0) && take(0) && is(OF_OPERATOR_ne);
        }
        if (name == "where")
            return is_mask(0) && choose(0, 1, 2);
        if (name == "masked_fill")
            return is_mask(1) && choose(1, 2, 0);
        return name == "_to_copy" && is_mask(0) && take(0, true) && is(OF_OPERATOR_copy);
    }

    bool choose(size_t mask, size_t yes, size_t no) {
        if (!take(mask, true))
            return false;
        if (is_tensor(yes) && is_tensor(no))
            return take(yes) && take(no) && is(OF_OPERATOR_where);
        const bool is_first = is_tensor(no);
        return take(is_first ? no : yes) && take_number(is_first ? yes : no, &made.s) &&
               is(is_first ? OF_OPERATOR_where_number_first : OF_OPERATOR_where_number_second);
    }

    bool of_masks() {
        if (name == "logical_not" || name == "bitwise_not")
            return is_mask(0) && take(0) && is(OF_OPERATOR_logical_not);
        const bool is_and = name == "logical_and" || name == "bitwise_and";
        return (is_and || name == "logical_or" || name == "bitwise_or") && is_mask(0) &&
               is_mask(1) && take(0) && take(1) &&
               is(is_and ? OF_OPERATOR_logical_and : OF_OPERATOR_logical_or);
    }

    bool clamp() {
        if (!has(1) || !has(2))
            return bound(has(1) ? 1 : 2, has(1));
        if (!bound(1, true))
            return false;
        second.emplace();
        second->operation = OF_OPERATOR_clamp_max;
        return take_number(2, &second->s) && made.n_read == 0;
    }

    bool product(of_operator of_two, of_operator with_number, of_operator number_first) {
        if (is_tensor(0) && is_tensor(1))
            return take(0) && take(1) && is(of_two);
        if (line.known->of_lists && is_narrow() && !is_on_gpu()) // numbers are rounded first
            return false;
        const size_t tensor = is_tensor(0) ? 0 : 1;
        return take(tensor) && take_number(1 - tensor, &made.s) &&
               is(tensor == 0 ? with_number : number_first);
    }

    // x + sign alpha y
    bool sum(size_t x, size_t y, double sign) {
        const bool has_alpha = has(2);
        if (is_tensor(x) && is_tensor(y)) {
            made.s = {sign, Number::kNone, Number::kNone};
            return take(x) && take(y) && (!has_alpha || take_number(2, &made.s, sign)) &&
                   made.n_read == 0 && is(OF_OPERATOR_add);
        }
        if (is_tensor(x)) {
            const auto alpha = known_number(2, 1.0);
            return alpha && std::fabs(*alpha) == 1.0 && take(x) &&
                   take_number(y, &made.s, sign * *alpha) && is(OF_OPERATOR_add_number);
        }
        made.t = {sign, Number::kNone, Number::kNone};
        return take(y) && take_number(x, &made.s) && (!has_alpha || take_number(2, &made.t, sign)) &&
               is(OF_OPERATOR_number_add);
    }

    // Most powers are a library's on the CPU, and on GPUs those of lists.
    bool power() {
        if (is_on_gpu() && line.known->of_lists)
            return false;
        const auto exponent = is_tensor(0) ? known_number(1, NAN) : std::nullopt;
        const auto operation = exponent ? found_in(kPowers, *exponent) : std::nullopt;
        if (!operation || (is_narrow() && *operation == OF_OPERATOR_rsqrt && !is_on_gpu()))
            return false;
        const bool is_half = like->dtype().toScalarType() == at::kHalf && !is_on_gpu();
        return (!is_half || *operation == OF_OPERATOR_square || *operation == OF_OPERATOR_copy) &&
               take(0) && is(*operation);
    }

    bool bound(size_t number, bool is_least) {
        return take(0) && take_number(number, &made.s) && made.n_read == 0 &&
               is(is_least ? OF_OPERATOR_clamp_min : OF_OPERATOR_clamp_max);
    }

    // Where several threads share out a tensor, each part has a tail of its own, whose elements
    // PyTorch's scalar code computes; our kernels have one tail.
    bool has_its_bits() const {
        const int64_t numel = like->numel(), threads = thread_count();
        if (numel < kSharedOut || threads == 1 || is_on_gpu())
            return true;
        const int64_t parts = std::min(threads, (numel + kSharedOut - 1) / kSharedOut);
        const int64_t part = (numel + parts - 1) / parts;
        constexpr int64_t kMostInStep = 128; // bytes: two vectors
        if (part * static_cast<int64_t>(like->dtype().itemsize()) % kMostInStep == 0)
            return true;
        switch (made.operation) {
        case OF_OPERATOR_lerp:
        case OF_OPERATOR_maximum:
        case OF_OPERATOR_minimum:
            return false;
        default:
            return !is_narrow();
        }
    }

    const Line &line;
    const uint32_t place;
    const std::vector<c10::IValue> &values;
    const Numbered &numbered;
    const size_t n; // arguments but out=
    const std::string_view name;
    const c10::TensorImpl *like = nullptr;
    bool is_of_masks = false;
    bool is_point = false; // no tensor has a dimension
    Instruction made = {};
    std::optional<Instruction> second; // on what the first one makes
};

} // namespace

double Number::in(const std::vector<c10::IValue> &values) const {
    if (value == kNone)
        return factor;
    const c10::IValue &its = values[value];
    return factor * value_of(element == kNone ? its : its.toListRef()[element]);
}

std::optional<of_dtype> dtype_of(at::ScalarType type) {
    switch (type) {
    case at::kFloat:
        return OF_FLOAT32;
    case at::kDouble:
        return OF_FLOAT64;
    case at::kBFloat16:
        return OF_BFLOAT16;
    case at::kHalf:
        return OF_FLOAT16;
    default:
        return {};
    }
}

std::vector<Instruction> translate(const Line &line, uint32_t place,
                                   const std::vector<c10::IValue> &values,
                                   const Numbered &numbered) {
    const bool is_of_places = !line.known->of_lists || values[line.first].isList();
    if (!line.known->may_fuse || !is_of_places)
        return {};
    return Translation(line, place, values, numbered).run();
}

} // namespace optfuse::recorded
