// SPDX-License-Identifier: BSD-3-Clause
#include "python/objects.h"

namespace optfuse {

bool is_exactly(of_object *object, of_object *type) {
    const Ref its(of_interpreter.type_of(object));
    return its.get() == type;
}

bool is_dict(of_object *object) {
    const Ref its(of_interpreter.type_of(object));
    return of_interpreter.is_subtype(its.get(), of_interpreter.dict_type) != 0;
}

void Objects::add_dict(of_object *dict) {
    of_object *key, *value;
    for (ssize_t i = 0; of_interpreter.dict_next(dict, &i, &key, &value);) {
        add(key);
        add(value);
    }
    end();
}

Ref Objects::keep() const {
    of_object *const kept = of_interpreter.new_list(0);
    for (of_object *const object : at)
        if (kept != nullptr)
            of_interpreter.append(kept, object != nullptr ? object : of_interpreter.none);
    return Ref(kept);
}

bool Comparison::next_is_list(of_object *list) {
    const ssize_t n = of_interpreter.list_size(list);
    for (ssize_t i = 0; i < n; i++)
        if (!next_is(of_interpreter.list_item(list, i)))
            return false;
    return next_is(nullptr);
}

bool Comparison::next_is_dict(of_object *dict) {
    const auto next = of_interpreter.dict_next;
    of_object *key, *value;
    ssize_t n = 0;
    for (ssize_t i = 0; at < last && *at != nullptr; at += 2, n++)
        if (!next(dict, &i, &key, &value) || at[0] != key || at[1] != value)
            return false;
    if (at == last)
        return false;
    at++;
    ssize_t start = 0;
    return n != 0 ? of_interpreter.dict_size(dict) == n : !next(dict, &start, &key, &value);
}

} // namespace optfuse
