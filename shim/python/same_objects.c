/* SPDX-License-Identifier: BSD-3-Clause */
/* same_objects.c: whether an optimizer's parameters, options and state are the objects of
 * before, asked of Python at every step. */
#include "python/interpreter.h"
#include "shim.h"

/* The objects that are remembered; their owner keeps them alive. */
typedef struct reading {
    const void *const *at;
    const void *const *end;
} reading;

static reading read_objects(const void *const *objects, size_t n) {
    return (reading){objects, objects + n};
}

static bool next_is(reading *from, const void *object) {
    return from->at < from->end && *from->at++ == object;
}

static bool at_end(const reading *from) {
    return from->at == from->end;
}

/* The keys and values of a dict, and then NULL. What is no dict has none. */
static bool next_is_dict(reading *from, void *dict) {
    int (*const next)(of_object *, ssize_t *, of_object **, of_object **) =
        of_interpreter.dict_next;
    const void *const *at = from->at;
    of_object *key, *value;
    ssize_t n = 0;
    for (ssize_t i = 0; at < from->end && *at != NULL; at += 2, n++)
        if (!next(dict, &i, &key, &value) || at[0] != key || at[1] != value)
            return false;
    if (at == from->end)
        return false;
    from->at = at + 1;
    ssize_t start = 0;
    return n != 0 ? of_interpreter.dict_size(dict) == n : !next(dict, &start, &key, &value);
}

bool of_shim_same_state(void *state, const void *const *entries, size_t n_entries,
                        const void *const *values, size_t n_values) {
    if (!of_python_find())
        return false;
    reading entry_list = read_objects(entries, n_entries);
    reading value_list = read_objects(values, n_values);
    if (!next_is_dict(&entry_list, state) || !at_end(&entry_list))
        return false;
    for (size_t i = 1; i < n_entries; i += 2)
        if (!next_is_dict(&value_list, (void *)entries[i]))
            return false;
    return at_end(&value_list);
}

bool of_shim_same_items(void *lists, const void *const *items, size_t n) {
    if (!of_python_find())
        return false;
    reading item_list = read_objects(items, n);
    const ssize_t n_lists = of_interpreter.list_size(lists);
    for (ssize_t l = 0; l < n_lists; l++) {
        struct _object *const list = of_interpreter.list_item(lists, l);
        const ssize_t n_items = of_interpreter.list_size(list);
        for (ssize_t i = 0; i < n_items; i++)
            if (!next_is(&item_list, of_interpreter.list_item(list, i)))
                return false;
        if (!next_is(&item_list, NULL))
            return false;
    }
    return at_end(&item_list);
}

/* One of a class that inherits from dict may give other values than are in it. */
static bool is_plain_dict(void *object) {
    struct _object *const type = of_interpreter.type_of(object);
    of_interpreter.drop(type);
    return type == of_interpreter.dict_type;
}

static bool same_dicts(void *dicts, const void *const *entries, size_t n) {
    reading entry_list = read_objects(entries, n);
    const ssize_t n_dicts = of_interpreter.list_size(dicts);
    for (ssize_t i = 0; i < n_dicts; i++) {
        struct _object *const dict = of_interpreter.list_item(dicts, i);
        if (!is_plain_dict(dict) || !next_is_dict(&entry_list, dict))
            return false;
    }
    return at_end(&entry_list);
}

bool of_shim_same_groups(void *groups, const void *const *entries, size_t n_entries, void *lists,
                         const void *const *items, size_t n_items) {
    return of_python_find() && same_dicts(groups, entries, n_entries) &&
           of_shim_same_items(lists, items, n_items);
}
