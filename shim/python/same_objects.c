/* SPDX-License-Identifier: BSD-3-Clause */
/* same_objects.c: whether an optimizer's parameters, options and state are the objects of
 * before, asked of Python at every step. */
#include "python/interpreter.h"
#include "shim.h"

/* A list that is read from its start. */
typedef struct reading {
    void *list;
    ssize_t size;
    ssize_t at;
} reading;

static reading read_list(void *list) {
    return (reading){list, of_interpreter.list_size(list), 0};
}

static bool next_is(reading *from, const void *object) {
    return from->at < from->size && of_interpreter.list_item(from->list, from->at++) == object;
}

static bool at_end(const reading *from) {
    return from->at == from->size;
}

bool of_shim_same_state(void *state, void *keys, void *entries, void *values) {
    if (!of_python_find())
        return false;
    reading key_list = read_list(keys), entry_list = read_list(entries),
            value_list = read_list(values);
    struct _object *key, *entry, *value;
    for (ssize_t i = 0; of_interpreter.dict_next(state, &i, &key, &entry);) {
        if (!next_is(&key_list, key) || !next_is(&entry_list, entry))
            return false;
        for (ssize_t k = 0; of_interpreter.dict_next(entry, &k, NULL, &value);)
            if (!next_is(&value_list, value))
                return false;
    }
    return at_end(&key_list) && at_end(&entry_list) && at_end(&value_list);
}

bool of_shim_same_items(void *lists, void *items) {
    if (!of_python_find())
        return false;
    reading item_list = read_list(items);
    for (reading outer = read_list(lists); !at_end(&outer); outer.at++) {
        reading inner = read_list(of_interpreter.list_item(outer.list, outer.at));
        for (; !at_end(&inner); inner.at++)
            if (!next_is(&item_list, of_interpreter.list_item(inner.list, inner.at)))
                return false;
        if (!next_is(&item_list, of_interpreter.none))
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

static bool same_entries(void *dict, void *entries) {
    if (!is_plain_dict(dict))
        return false;
    reading entry_list = read_list(entries);
    struct _object *key, *value;
    for (ssize_t i = 0; of_interpreter.dict_next(dict, &i, &key, &value);)
        if (!next_is(&entry_list, key) || !next_is(&entry_list, value))
            return false;
    return at_end(&entry_list);
}

static bool same_dicts(void *dicts, void *entries) {
    reading dict_list = read_list(dicts), entries_list = read_list(entries);
    for (; !at_end(&dict_list) && !at_end(&entries_list); dict_list.at++, entries_list.at++)
        if (!same_entries(of_interpreter.list_item(dict_list.list, dict_list.at),
                          of_interpreter.list_item(entries_list.list, entries_list.at)))
            return false;
    return at_end(&dict_list) && at_end(&entries_list);
}

bool of_shim_same_groups(void *groups, void *entries, void *lists, void *items) {
    return of_python_find() && same_dicts(groups, entries) && of_shim_same_items(lists, items);
}
