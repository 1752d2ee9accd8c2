// SPDX-License-Identifier: BSD-3-Clause
#include "recorded/numbered.h"

#include <utility>

#include "base/parallel.h"
#include "python/interpreter.h"

namespace optfuse::recorded {
namespace {

enum : uint64_t { kOfTensor, kOfNoTensor, kOfWrapped, kOfDouble, kOfInt, kOfBool, kOfList, kOfOther };

// Exponents and factors for which there is another instruction than for others (translate.cpp).
uint64_t class_of(double x) {
    for (const double one : {-2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 3.0})
        if (x == one)
            return static_cast<uint64_t>(static_cast<int64_t>(one * 4));
    return 1;
}

// Python is asked whether a wrapper is in use, which takes the GIL: once for all of them.
class Lone {
  public:
    ~Lone() {
        if (has_gil)
            of_interpreter.give_gil(state);
    }
    bool operator()(const Entry &e) {
        const size_t users = c10::raw::intrusive_ptr::use_count(e.impl);
        if (!e.is_alone || e.impl->unsafe_storage().use_count() != 1 || users > e.seen + 1)
            return false;
        if (users == e.seen + 1 && !std::exchange(has_gil, true))
            state = of_interpreter.take_gil();
        return users == e.seen + idle_references(*e.impl);
    }

  private:
    bool has_gil = false;
    int state = 0;
};

} // namespace

void Heads::clear(size_t most) {
    if (table.size() < 2 * most || ++round == 0) {
        size_t bits = 8;
        while (size_t(1) << bits < 2 * most)
            bits++;
        table.assign(size_t(1) << bits, Head());
        shift = 64 - static_cast<unsigned>(bits);
        round = 1;
    }
}

uint32_t Numbered::find(const c10::TensorImpl *impl, uint32_t first) const {
    for (uint32_t i = first; i != UINT32_MAX; i = entries[i].next) {
        const Entry &e = entries[i];
        if (e.impl == impl ||
            (e.offset == impl->storage_offset() && e.dtype == impl->dtype().toScalarType() &&
             equal(e.impl->sizes(), impl->sizes()) && equal(e.impl->strides(), impl->strides())))
            return i;
    }
    return UINT32_MAX;
}

uint32_t Numbered::of(const at::Tensor &tensor) const {
    const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    return find(impl, heads.at(storage_of(impl), UINT32_MAX));
}

void Numbered::put_new(c10::TensorImpl *impl, uint32_t head) {
    const auto number = static_cast<uint32_t>(entries.size());
    Entry &e = entries.emplace_back();
    e.impl = impl;
    e.storage = storage_of(impl);
    e.offset = impl->storage_offset();
    e.numel = impl->numel();
    e.dtype = impl->dtype().toScalarType();
    e.is_absent = is_absent(e.storage);
    e.storage_number = head == UINT32_MAX ? n_storages++ : entries[head].storage_number;
    if (head != UINT32_MAX) {
        e.next = entries[head].next;
        entries[head].next = number;
        e.is_alone = entries[head].is_alone = false;
    }
    const auto sizes = impl->sizes(), strides = impl->strides();
    const bool is_plain = impl->is_contiguous(); // by which the sizes say the strides
    need(3 + 2 * sizes.size());
    word(static_cast<uint64_t>(e.storage_number) << 32 |
         static_cast<uint64_t>(impl->device().index() + 1) << 24 | sizes.size() << 16 |
         static_cast<uint64_t>(e.dtype) << 8 | static_cast<uint64_t>(is_plain) << 3 |
         static_cast<uint64_t>(e.is_absent) << 2 |
         static_cast<uint64_t>(impl->is_non_overlapping_and_dense()) << 1 |
         static_cast<uint64_t>(impl->is_cpu()));
    word(static_cast<uint64_t>(e.offset));
    for (const int64_t size : sizes)
        word(static_cast<uint64_t>(size));
    for (size_t i = 0; i < strides.size() && !is_plain; i++)
        word(static_cast<uint64_t>(strides[i]));
}

void Numbered::put(const at::Tensor &tensor) {
    need(1);
    if (!tensor.defined())
        return word(kOfNoTensor);
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    if (impl->is_wrapped_number()) // made of a number, for this line
        return word(static_cast<uint64_t>(impl->dtype().toScalarType()) << 8 | kOfWrapped);
    const auto next = static_cast<uint32_t>(entries.size());
    const uint32_t head = heads.at(storage_of(impl), next);
    uint32_t number = head == next ? UINT32_MAX : find(impl, head);
    word(static_cast<uint64_t>(number == UINT32_MAX ? next : number) << 8 | kOfTensor);
    if (number == UINT32_MAX) {
        put_new(impl, head == next ? UINT32_MAX : head);
        number = next;
    }
    if (entries[number].impl == impl)
        entries[number].seen++;
    else
        entries[number].is_alone = false;
}

void Numbered::put(const c10::IValue &value, bool by_class) {
    need(2);
    if (value.isTensor()) {
        put(value.toTensor());
    } else if (value.isDouble()) {
        word(kOfDouble);
        if (by_class)
            word(class_of(value.toDouble()));
    } else if (value.isInt()) {
        word(kOfInt);
        if (by_class)
            word(class_of(static_cast<double>(value.toInt())));
    } else if (value.isList()) {
        const auto elements = value.toListRef();
        word(elements.size() << 8 | kOfList);
        for (const c10::IValue &element : elements)
            put(element, by_class);
    } else {
        word(value.isBool() ? static_cast<uint64_t>(value.toBool()) << 8 | kOfBool
                            : static_cast<uint64_t>(value.isNone()) << 8 | kOfOther);
    }
}

void Numbered::read(const std::vector<Line> &lines, const std::vector<c10::IValue> &values) {
    size_t most = 0;
    for (const c10::IValue &value : values)
        most += value.isTensor() ? 1 : value.isList() ? value.toListRef().size() : 0;
    entries.clear();
    heads.clear(most);
    n_storages = 0;
    n_words = 0;
    need(1);
    word(static_cast<uint64_t>(thread_count()));
    for (const Line &line : lines) {
        need(1);
        word(reinterpret_cast<uintptr_t>(line.known));
        for (uint32_t i = line.first; i < line.end; i++)
            put(values[i], i < line.results && line.known->classes[i - line.first]);
    }
    need(entries.size());
    Lone is_lone;
    for (Entry &e : entries)
        if (e.is_absent) {
            e.is_needed = !is_lone(e);
            word(e.is_needed);
        }
}

} // namespace optfuse::recorded
