// SPDX-License-Identifier: BSD-3-Clause
#include "traced/parts.h"

#include <ATen/ScalarOps.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include "error.h"
#include "guard.h"

namespace optfuse {
namespace {

// The kind of an argument; _traced/parts.py writes the same numbers.
enum Tag : int64_t {
    kNone,
    kRegister,
    kInt,
    kDouble,
    kBool,
    kList,
    kNumber, // a tensor without dimensions: its dtype; its value is the next number
    kString,
    kDevice,
    kDefault
};

// Reads the words that make_parts() is given.
struct Reader {
    const std::vector<std::string> &words;
    const std::vector<int64_t> &code;
    const std::vector<double> &numbers;
    const int64_t n_registers;
    std::vector<bool> whole; // registers: as many elements as the parameter, of its dtype
    size_t next_word = 0, next = 0, next_number = 0;

    bool at_end() const { return next == code.size(); }

    Part part() {
        Part made{Segment(), {}};
        switch (integer()) {
        case 0:
            made.what = segment();
            break;
        case 1:
            made.what = call();
            break;
        default:
            made.what = branch();
        }
        made.frees = registers();
        return made;
    }

    int64_t integer() {
        if (next >= code.size())
            fail("optfuse: a program ends too early");
        return code[next++];
    }
    double number() {
        if (next_number >= numbers.size())
            fail("optfuse: a program has too few numbers");
        return numbers[next_number++];
    }
    const std::string &word() {
        if (next_word >= words.size())
            fail("optfuse: a program has too few words");
        return words[next_word++];
    }
    int64_t known(int64_t value) const {
        if (value < -1 || value >= n_registers)
            fail("optfuse: a program has an unknown register");
        return value;
    }
    size_t from() {
        const int64_t value = known(integer());
        if (value < 0)
            fail("optfuse: a program reads no register");
        return static_cast<size_t>(value);
    }
    std::vector<int64_t> registers() {
        std::vector<int64_t> list(static_cast<size_t>(integer()));
        for (int64_t &value : list)
            value = known(integer());
        return list;
    }

    void set_whole(const std::vector<int64_t> &list) {
        for (const int64_t value : list)
            if (value >= 0)
                whole[static_cast<size_t>(value)] = true;
    }

    Segment segment() {
        Segment made;
        for (int64_t &value : made.memory)
            value = known(integer());
        made.makes = registers();
        set_whole(made.makes);
        for (const int64_t value : made.memory)
            if (value >= 0 && !whole[static_cast<size_t>(value)] && OF_GUARD(elements))
                fail("optfuse: a program combines tensors of different numbers of elements");
        made.patches.resize(static_cast<size_t>(integer()));
        for (Segment::Patch &patch : made.patches) {
            patch.instruction = static_cast<size_t>(integer());
            patch.is_second = integer() != 0;
            patch.from = from();
            patch.sign = static_cast<double>(integer());
        }
        const auto n = static_cast<size_t>(integer());
        for (size_t i = 0; i < n; i++) {
            of_instruction q = {};
            for (unsigned char *field : {&q.operation, &q.to, &q.a, &q.b, &q.c})
                *field = static_cast<unsigned char>(integer());
            q.s = number();
            q.t = number();
            made.code.push_back(q);
        }
        for (const Segment::Patch &patch : made.patches)
            if (patch.instruction >= n)
                fail("optfuse: a program has an unknown instruction");
        of_program core = {};
        core.code = made.code.data();
        core.n = n;
        if (const char *wrong = of_program_check(&core))
            fail(std::string("optfuse: a program can't be run: ") + wrong);
        for (size_t i = 0; i < OF_REGISTER_TEMPORARY; i++)
            if (made.memory[i] < 0 && ((core.reads | core.writes) >> i & 1u) != 0)
                fail("optfuse: a program has a register without memory");
        if (made.patches.empty()) // else these are the places of its numbers
            made.code.resize(of_program_fuse(made.code.data(), n));
        made.core = core;
        made.core.n = made.code.size();
        return made;
    }

    Branch branch() {
        const int64_t from = known(integer());
        return {from, static_cast<size_t>(integer())};
    }

    Call call() {
        const std::string &name = word(), &overload = word();
        Call made{c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()),
                  {},
                  {},
                  registers()};
        set_whole(registers());
        const auto &schema = made.operation.schema();
        if (made.results.size() > schema.returns().size() && schema.returns().size() != 1)
            fail("optfuse: a program has an operator with too many results");
        for (size_t i = 0; i < schema.arguments().size(); i++) {
            const c10::Argument &argument = schema.arguments()[i];
            made.arguments.push_back(value(made, i, argument, argument.real_type()));
        }
        return made;
    }

    c10::IValue value(Call &made, size_t i, const c10::Argument &argument, c10::TypePtr type) {
        if (const auto optional = type->cast<c10::OptionalType>())
            type = optional->getElementType();
        const int64_t tag = integer();
        if (tag == kDefault)
            return argument.default_value().value_or(c10::IValue());
        if (tag == kRegister) {
            made.places.push_back({i, -1, from()});
            return at::Tensor();
        }
        if (tag == kList)
            return list(made, i, type);
        return plain(tag, type);
    }

    // A number as an argument of this type.
    template <typename T> static c10::IValue as(T x, const c10::TypePtr &type) {
        if (type->kind() == c10::TypeKind::TensorType)
            return at::native::wrapped_scalar_tensor(x);
        if (type->kind() == c10::TypeKind::FloatType)
            return static_cast<double>(x);
        return x;
    }

    c10::IValue plain(int64_t tag, const c10::TypePtr &type) {
        switch (tag) {
        case kNone:
            return {};
        case kInt:
            return as(integer(), type);
        case kDouble:
            return as(number(), type);
        case kBool:
            return as(integer() != 0, type);
        case kNumber: {
            const auto dtype = static_cast<at::ScalarType>(integer());
            return at::scalar_tensor(number(), at::TensorOptions().dtype(dtype));
        }
        case kString:
            return word();
        case kDevice:
            return c10::Device(word());
        default:
            fail("optfuse: a program has an unknown argument");
        }
    }

    // A list of tensors or of numbers.
    c10::IValue list(Call &made, size_t i, const c10::TypePtr &type) {
        const auto n = static_cast<size_t>(integer());
        const auto of = type->cast<c10::ListType>();
        if (!of)
            fail("optfuse: a program has a list where its operator takes none");
        const c10::TypePtr &element = of->getElementType();
        if (element->kind() == c10::TypeKind::TensorType) {
            c10::List<at::Tensor> tensors;
            for (size_t k = 0; k < n; k++) {
                const int64_t tag = integer();
                if (tag == kRegister)
                    made.places.push_back({i, static_cast<int64_t>(k), from()});
                tensors.push_back(tag == kRegister ? at::Tensor() : plain(tag, element).toTensor());
            }
            return tensors;
        }
        c10::impl::GenericList values(element->kind() == c10::TypeKind::SymIntType
                                          ? c10::TypePtr(c10::IntType::get())
                                          : element);
        for (size_t k = 0; k < n; k++)
            values.push_back(plain(integer(), element));
        return values;
    }
};

using Registers = std::vector<at::Tensor>;

// A tensor over memory that somebody else owns.
at::Tensor over(const void *memory, at::ScalarType dtype, at::IntArrayRef sizes,
                at::IntArrayRef strides) {
    if (c10::multiply_integers(sizes) == 0)
        return at::empty_strided(sizes, strides, at::TensorOptions().dtype(dtype));
    return at::from_blob(const_cast<void *>(memory), sizes, strides,
                         at::TensorOptions().dtype(dtype));
}

at::Tensor over(const void *memory, const c10::TensorImpl *like,
                const std::optional<Form> &form = {}) {
    const at::ScalarType dtype = form ? form->dtype : like->dtype().toScalarType();
    if (form && !form->is_of_param)
        return over(memory, dtype, form->sizes, form->strides);
    return over(memory, dtype, like->sizes(), like->strides());
}

// The kernels read and write as many elements there as the parameter has.
void *memory_of(const Registers &at, int64_t number, const c10::TensorImpl *like) {
    if (number < 0)
        return nullptr;
    const at::Tensor &tensor = at[static_cast<size_t>(number)];
    if (OF_GUARD(elements) && (tensor.numel() != like->numel() || tensor.dtype() != like->dtype()))
        fail("optfuse: a program would read or write beyond the end of a tensor");
    return tensor.mutable_data_ptr();
}

void run(of_plan *plan, const Segment &segment, Registers &at, const of_inputs &in,
         const c10::TensorImpl *like) {
    for (const int64_t made : segment.makes)
        at[static_cast<size_t>(made)] =
            at::empty_strided(like->sizes(), like->strides(),
                              at::TensorOptions().dtype(like->dtype()).device(like->device()));
    std::vector<of_instruction> patched;
    of_program program = segment.core;
    if (!segment.patches.empty()) {
        patched = segment.code;
        for (const Segment::Patch &patch : segment.patches) {
            of_instruction &q = patched[patch.instruction];
            (patch.is_second ? q.t : q.s) = patch.sign * at[patch.from].item<double>();
        }
    }
    program.code = patched.empty() ? segment.code.data() : patched.data();
    of_part part = {};
    part.numel = in.numel;
    part.dtype = in.dtype;
    part.program = &program;
    for (size_t i = 0; i < OF_REGISTER_TEMPORARY; i++)
        part.memory[i] = memory_of(at, segment.memory[i], like);
    if (of_plan_run_programs(plan, &part, 1) != OF_OK)
        fail(of_error_message());
}

// The list of a template belongs to it.
c10::IValue copied(const c10::IValue &value) {
    return value.isTensorList() ? c10::IValue(value.toTensorList().copy()) : value;
}

void run(const Call &call, Registers &at) {
    torch::jit::Stack stack;
    for (const c10::IValue &argument : call.arguments)
        stack.push_back(copied(argument));
    for (const Call::Place &place : call.places) {
        const at::Tensor &tensor = at[place.from];
        if (place.item < 0)
            stack[place.argument] = tensor;
        else
            stack[place.argument].toTensorList().set(static_cast<size_t>(place.item), tensor);
    }
    call.operation.callBoxed(&stack);
    std::vector<at::Tensor> results;
    for (const c10::IValue &value : stack) {
        if (value.isTensorList())
            for (const at::Tensor &tensor : value.toTensorVector())
                results.push_back(tensor);
        else
            results.push_back(value.toTensor());
    }
    if (results.size() < call.results.size())
        fail("optfuse: an operator has fewer results than it had when it was traced");
    for (size_t i = 0; i < call.results.size(); i++)
        if (call.results[i] >= 0)
            at[static_cast<size_t>(call.results[i])] = results[i];
}

// As Python sees it: NaN is true.
bool is_true(const Branch &branch, const Registers &at) {
    return branch.from >= 0 && at[static_cast<size_t>(branch.from)].item<double>() != 0.0;
}

} // namespace

std::vector<Part> make_parts(const std::vector<std::string> &words,
                             const std::vector<int64_t> &code, const std::vector<double> &numbers,
                             const Forms &forms, int64_t n_registers) {
    std::vector<Part> parts;
    Reader reader{words, code, numbers, n_registers, {}};
    if (n_registers < OF_REGISTER_TEMPORARY)
        fail("optfuse: a program has too few registers");
    reader.whole.resize(static_cast<size_t>(n_registers));
    reader.set_whole({OF_REGISTER_PARAM, OF_REGISTER_GRAD});
    for (size_t i = 0; i < forms.size(); i++)
        reader.whole[OF_REGISTER_STATE + i] = !forms[i];
    while (!reader.at_end())
        parts.push_back(reader.part());
    for (size_t i = 0; i < parts.size(); i++)
        if (const auto *branch = std::get_if<Branch>(&parts[i].what))
            if (branch->skipped >= parts.size() - i)
                fail("optfuse: a program's branch leads beyond its end");
    return parts;
}

Forms make_forms(const std::vector<int64_t> &words) {
    Forms forms;
    size_t next = 0;
    const auto word = [&] {
        if (next >= words.size())
            fail("optfuse: a form of state ends too early");
        return words[next++];
    };
    while (next < words.size()) {
        const auto place = static_cast<size_t>(word());
        if (place >= forms.size())
            fail("optfuse: a form is of no state");
        Form form{static_cast<at::ScalarType>(word()), false, {}, {}};
        const int64_t n = word();
        form.is_of_param = n < 0;
        for (std::vector<int64_t> *list : {&form.sizes, &form.strides})
            for (int64_t i = 0; i < n; i++)
                list->push_back(word());
        forms[place] = std::move(form);
    }
    return forms;
}

void run_parts(of_plan *plan, const std::vector<Part> &parts, const Forms &forms,
               size_t n_registers, unsigned state, const of_inputs &in,
               const c10::TensorImpl *like) {
    Registers at(n_registers);
    at[OF_REGISTER_PARAM] = over(in.param, like);
    at[OF_REGISTER_GRAD] = over(in.grad, like);
    for (size_t i = 0; i < OF_MAX_STATE; i++)
        if ((state >> i & 1u) != 0)
            at[OF_REGISTER_STATE + i] = over(in.state[i], like, forms[i]);
    for (size_t i = 0; i < parts.size(); i++) {
        const Part &part = parts[i];
        if (const auto *segment = std::get_if<Segment>(&part.what))
            run(plan, *segment, at, in, like);
        else if (const auto *call = std::get_if<Call>(&part.what))
            run(*call, at);
        else if (const auto &branch = std::get<Branch>(part.what); !is_true(branch, at))
            i += branch.skipped;
        for (const int64_t number : part.frees)
            at[static_cast<size_t>(number)] = at::Tensor();
    }
}

} // namespace optfuse
