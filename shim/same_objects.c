/* SPDX-License-Identifier: BSD-3-Clause */
/* same_objects.c: whether an optimizer's parameters, options and state are the objects of
 * before, asked of Python at every step. Nothing of Python is linked, so its functions,
 * all of the stable ABI, are looked up in the process. */
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>
#include <sys/types.h>

#include "shim.h"

static struct {
    int (*dict_next)(void *dict, ssize_t *position, void **key, void **value);
    ssize_t (*list_size)(void *list);
    void *(*list_item)(void *list, ssize_t i); /* borrowed */
    void *(*type_of)(void *object); /* a new reference */
    void (*drop)(void *object);
    void *dict_type, *none;
} objects;
static pthread_once_t looked_up = PTHREAD_ONCE_INIT;

static void look_up_objects(void) {
    void *const next = dlsym(RTLD_DEFAULT, "PyDict_Next");
    void *const size = dlsym(RTLD_DEFAULT, "PyList_Size");
    void *const item = dlsym(RTLD_DEFAULT, "PyList_GetItem");
    memcpy(&objects.dict_next, &next, sizeof next);
    memcpy(&objects.list_size, &size, sizeof size);
    memcpy(&objects.list_item, &item, sizeof item);
    void *const type_of = dlsym(RTLD_DEFAULT, "PyObject_Type");
    void *const drop = dlsym(RTLD_DEFAULT, "Py_DecRef");
    memcpy(&objects.type_of, &type_of, sizeof type_of);
    memcpy(&objects.drop, &drop, sizeof drop);
    objects.dict_type = dlsym(RTLD_DEFAULT, "PyDict_Type");
    objects.none = dlsym(RTLD_DEFAULT, "_Py_NoneStruct");
}

/* A list that is read from its start. */
typedef struct reading {
    void *list;
    ssize_t size;
    ssize_t at;
} reading;

static reading read_list(void *list) {
    return (reading){list, objects.list_size(list), 0};
}

static bool next_is(reading *from, const void *object) {
    return from->at < from->size && objects.list_item(from->list, from->at++) == object;
}

static bool at_end(const reading *from) {
    return from->at == from->size;
}

bool of_shim_same_state(void *state, void *keys, void *entries, void *values) {
    pthread_once(&looked_up, look_up_objects);
    reading key_list = read_list(keys), entry_list = read_list(entries),
            value_list = read_list(values);
    void *key, *entry, *value;
    for (ssize_t i = 0; objects.dict_next(state, &i, &key, &entry);) {
        if (!next_is(&key_list, key) || !next_is(&entry_list, entry))
            return false;
        for (ssize_t k = 0; objects.dict_next(entry, &k, NULL, &value);)
            if (!next_is(&value_list, value))
                return false;
    }
    return at_end(&key_list) && at_end(&entry_list) && at_end(&value_list);
}

bool of_shim_same_items(void *lists, void *items) {
    pthread_once(&looked_up, look_up_objects);
    reading item_list = read_list(items);
    for (reading outer = read_list(lists); !at_end(&outer); outer.at++) {
        for (reading inner = read_list(objects.list_item(outer.list, outer.at)); !at_end(&inner);
             inner.at++)
            if (!next_is(&item_list, objects.list_item(inner.list, inner.at)))
                return false;
        if (!next_is(&item_list, objects.none))
            return false;
    }
    return at_end(&item_list);
}

/* One of a class that inherits from dict may give other values than are in it. */
static bool is_plain_dict(void *object) {
    void *const type = objects.type_of(object);
    objects.drop(type);
    return type == objects.dict_type;
}

static bool same_entries(void *dict, void *entries) {
    if (!is_plain_dict(dict))
        return false;
    reading entry_list = read_list(entries);
    void *key, *value;
    for (ssize_t i = 0; objects.dict_next(dict, &i, &key, &value);)
        if (!next_is(&entry_list, key) || !next_is(&entry_list, value))
            return false;
    return at_end(&entry_list);
}

static bool same_dicts(void *dicts, void *entries) {
    reading dict_list = read_list(dicts), entries_list = read_list(entries);
    for (; !at_end(&dict_list) && !at_end(&entries_list); dict_list.at++, entries_list.at++)
        if (!same_entries(objects.list_item(dict_list.list, dict_list.at),
                          objects.list_item(entries_list.list, entries_list.at)))
            return false;
    return at_end(&dict_list) && at_end(&entries_list);
}

bool of_shim_same_groups(void *groups, void *entries, void *lists, void *items) {
    pthread_once(&looked_up, look_up_objects);
    return same_dicts(groups, entries) && of_shim_same_items(lists, items);
}
