// SPDX-License-Identifier: BSD-3-Clause
#include "recorded/known.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <mutex>
#include <string_view>
#include <unordered_set>

namespace optfuse::recorded {
namespace {

using Names = std::unordered_set<std::string_view>;

// One element of the results comes from one element of each operand, in the operands' dtype.
const Names kElementwise = {
    "add",   "sub",   "mul",     "div",     "sqrt",      "rsqrt",     "neg",        "abs",
    "pow",   "sign",  "lerp",    "addcmul", "addcdiv",   "maximum",   "minimum",    "clamp",
    "exp",   "log",   "tanh",    "sigmoid", "clamp_min", "clamp_max", "reciprocal", "fill",
    "zero",  "copy",  "rsub",    "sin",     "cos",       "atan",      "erf",        "log1p",
    "expm1", "clone", "trunc",   "floor",   "ceil",      "frac"};

const Names kComparing = {"gt", "lt", "ge", "le", "eq", "ne"};

// Others that can't fail but by the forms of their operands, if these are no integers.
const Names kLines = {
    "sum",         "mean",        "norm",        "linalg_vector_norm", "mm",          "addmm",
    "bmm",         "baddbmm",     "addbmm",      "mv",                 "addmv",       "dot",
    "vdot",        "addr",        "cat",         "stack",              "where",       "_to_copy",
    "amax",        "amin",        "max",         "min",                "var",         "std",
    "cumsum",      "cumprod",     "prod",        "tril",               "triu",        "flip",
    "roll",        "zeros_like",  "ones_like",   "full_like",          "new_zeros",   "new_ones",
    "new_full",    "logical_and", "logical_or",  "logical_not",        "logical_xor", "bitwise_and",
    "bitwise_or",  "bitwise_not", "isnan",       "isinf",              "isfinite",    "nan_to_num",
    "masked_fill", "sinh",        "cosh",        "tan",                "asin",        "acos",
    "atan2",       "hypot",       "round",       "fmod",               "remainder",   "softplus",
    "relu",        "silu",        "gelu",        "log2",               "log10",       "exp2",
    "sgn",         "fmax",        "fmin",        "heaviside",          "copysign",    "xlogy",
    "_softmax",    "logsumexp",   "all",         "any",                "median",      "sort",
    "full",        "zeros",       "ones",        "scalar_tensor"}; // the last ones on GPUs

// Some calls of these operators are elementwise, too.
const Names kSometimes = {"zeros_like",  "ones_like",   "full_like",   "where",
                          "masked_fill", "_to_copy",    "logical_and", "logical_or",
                          "logical_not", "bitwise_and", "bitwise_or",  "bitwise_not", "isnan"};

bool is_tensor(const c10::Type &type) {
    if (type.kind() == c10::TypeKind::OptionalType || type.kind() == c10::TypeKind::ListType)
        return is_tensor(*type.containedType(0));
    return type.kind() == c10::TypeKind::TensorType;
}

bool is_number(const c10::Type &type) {
    if (type.kind() == c10::TypeKind::OptionalType || type.kind() == c10::TypeKind::ListType)
        return is_number(*type.containedType(0));
    return type.kind() == c10::TypeKind::NumberType || type.kind() == c10::TypeKind::FloatType;
}

bool begins_with(const std::string &text, std::string_view head) {
    return text.compare(0, head.size(), head) == 0;
}

bool ends_with(const std::string &text, std::string_view tail) {
    return text.size() >= tail.size() &&
           text.compare(text.size() - tail.size(), tail.size(), tail) == 0;
}

bool is_view(const c10::FunctionSchema &schema, const std::string &name) {
    const auto &returns = schema.returns();
    const bool is_alias = std::any_of(returns.begin(), returns.end(), [](const auto &r) {
        return r.alias_info() && !r.alias_info()->isWrite();
    });
    return is_alias || name == "_unsafe_view" || name == "_reshape_alias" || name == "lift_fresh" ||
           name == "lift";
}

// Fills in `returned`: each result has to be an argument.
bool gives_arguments(Known *k, const c10::FunctionSchema &schema) {
    const auto &arguments = schema.arguments();
    for (const c10::Argument &result : schema.returns()) {
        size_t i = 0;
        while (i < k->n && !(result.alias_info() && arguments[i].alias_info() &&
                             *arguments[i].alias_info() == *result.alias_info()))
            i++;
        if (i == k->n)
            return false;
        k->returned.push_back(i);
    }
    return true;
}

Way way_of(Known *k, const c10::OperatorHandle &op, const std::string &name) {
    const auto &schema = op.schema();
    const auto &arguments = schema.arguments();
    if (name == "resolve_conj" || name == "resolve_neg") // numpy() and tolist() begin with them
        return Way::LOOK;
    if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
        return Way::THROUGH;
    const bool writes = k->writes.any();
    const bool draws =
        op.hasTag(at::Tag::nondeterministic_seeded) ||
        std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument &a) {
            return a.type()->str().find("Generator") != std::string::npos;
        });
    k->makes_blank = !writes && (begins_with(name, "empty") || begins_with(name, "new_empty") ||
                                 (draws && ends_with(name, "_like")));
    if (draws)
        return Way::DRAW;
    if (name == "detach_")
        return Way::VIEW;
    if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output) ||
        op.hasTag(at::Tag::inplace_view))
        return Way::AT_ONCE;
    if (!writes && is_view(schema, name))
        return Way::VIEW;
    k->compares = kComparing.count(k->name) != 0 && !writes;
    k->elementwise = kElementwise.count(k->name) != 0 || k->compares;
    // May change the form of out=, unless the rule for elementwise operators knows it.
    k->has_out = schema.overload_name().find("out") != std::string::npos;
    if (k->has_out && (!k->elementwise || k->of_lists || !k->writes[k->n - 1]))
        return Way::AT_ONCE;
    k->fills = k->name == "fill";
    k->may_fuse = k->elementwise || kSometimes.count(k->name) != 0;
    if (kElementwise.count(k->name) + kComparing.count(k->name) + kLines.count(k->name) == 0)
        return Way::AT_ONCE;
    const auto &returns = schema.returns();
    if (!std::all_of(returns.begin(), returns.end(), [](const auto &r) { return is_tensor(*r.type()); }))
        return Way::AT_ONCE;
    if (writes) {
        while (!k->writes[k->target])
            k->target++;
        return gives_arguments(k, schema) ? Way::WRITE : Way::AT_ONCE;
    }
    return returns.empty() ? Way::AT_ONCE : Way::MAKE;
}

// It writes arguments only, and can't fail: who calls it has looked at their forms.
bool is_our_line(const c10::FunctionSchema &schema) { return schema.name() == "optfuse::factored"; }

Known look_at(const c10::OperatorHandle &op) {
    Known k;
    const auto &schema = op.schema();
    k.n = schema.arguments().size();
    if (is_our_line(schema)) {
        k.way = Way::WRITE;
        k.fits = true;
        for (size_t i = 0; i < k.n; i++)
            k.writes[i] = schema.arguments()[i].alias_info() != nullptr;
        return k;
    }
    k.is_ours = begins_with(schema.name(), "optfuse::");
    if (begins_with(schema.name(), "profiler::")) // touches no tensor
        return k;
    k.reads_all = !begins_with(schema.name(), "aten::") || begins_with(schema.name(), "aten::set_");
    if (k.reads_all)
        return k;
    for (size_t i = 0; i < k.n; i++) {
        const c10::Argument &a = schema.arguments()[i];
        k.number[i] = is_number(*a.real_type());
        k.tensor[i] = a.real_type()->kind() == c10::TypeKind::TensorType;
        k.writes[i] = a.alias_info() && a.alias_info()->isWrite();
    }
    std::string name = schema.name().substr(std::string_view("aten::").size());
    const std::string_view prefix = "_foreach_";
    k.of_lists = begins_with(name, prefix);
    k.name = k.of_lists ? name.substr(prefix.size()) : name;
    if (!k.name.empty() && k.name.back() == '_')
        k.name.pop_back();
    k.way = way_of(&k, op, name);
    for (size_t i = 0; i < k.n; i++)
        k.classes[i] = k.elementwise && ((k.name == "pow" && i == 1) || i == 2);
    return k;
}

} // namespace

// Each thread has a map of its own to what all threads share.
const Known &known(const c10::OperatorHandle &op) {
    static thread_local ska::flat_hash_map<const c10::FunctionSchema *, const Known *> here;
    const c10::FunctionSchema *key = &op.schema();
    const auto found = here.find(key);
    if (found != here.end())
        return *found->second;
    static std::mutex guards_all;
    static auto &all = *new ska::flat_hash_map<const c10::FunctionSchema *, const Known *>;
    const std::lock_guard<std::mutex> lock(guards_all);
    const Known *&one = all[key];
    if (one == nullptr)
        one = new Known(look_at(op));
    here[key] = one;
    return *one;
}

} // namespace optfuse::recorded
