/* SPDX-License-Identifier: BSD-3-Clause */
/* call_first.c: functions that are written in C call one of Python's before they do anything.
 * Python calls such a function by a record, which all that stand for it share: a method of a class
 * and of its instances, an attribute of a module, and what a script has imported from there long
 * ago. So the record is changed, and no name. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "optfuse.h"
#include "python/interpreter.h"
#include "shim.h"

/* PyCFunction, whatever its arguments: the functions below pass on what they got. */
typedef of_object *(*c_function)(of_object *self, void *a, void *b, void *c);

/* PyMethodDef */
typedef struct record {
    const char *name;
    c_function call;
    int flags;
    const char *doc;
} record;

/* How a function takes its arguments, after self: METH_ of Python. */
enum {
    TUPLE = 1,    /* a: a tuple; b: with KEYWORDS, a dict or NULL */
    KEYWORDS = 2, /* b or c has them */
    NO_ARGUMENTS = 4,
    ONE = 8,         /* a: it */
    COEXISTS = 0x40, /* says nothing of arguments */
    ARRAY = 0x80     /* a: objects, b: how many, c: with KEYWORDS, a tuple of names or NULL */
};

/* Written once, with the GIL. */
typedef struct changed {
    c_function stock;
    of_object *first;
    int kind;
    bool is_method; /* self is an argument, too */
} changed;

/* As PyObject_Vectorcall(), which Python 3.10 does not export; but values of keywords come by
 * position, since no `first` needs their names. */
static of_object *call_array(of_object *first, of_object *const *values, size_t n) {
    of_object *const list = of_interpreter.new_list(0), *tuple = NULL, *result = NULL;
    size_t i = 0;
    while (list && i < n && of_interpreter.append(list, values[i]) == 0)
        i++;
    if (list && i == n)
        tuple = of_interpreter.tuple_of(list);
    if (tuple) {
        result = of_interpreter.call_with(first, tuple, NULL);
        of_interpreter.drop(tuple);
    }
    if (list)
        of_interpreter.drop(list);
    return result;
}

/* Calls `first`: what that returns, or NULL after an error. */
static of_object *call_with_arguments(const changed *f, void *a, void *b, void *c) {
    const bool keywords = f->kind & KEYWORDS;
    switch (f->kind & ~KEYWORDS) {
    case TUPLE:
        return of_interpreter.call_with(f->first, a, keywords ? b : NULL);
    case ONE:
        return of_interpreter.call_objects(f->first, a, NULL);
    case ARRAY:
        return call_array(f->first, a,
                          (size_t)b + (keywords && c ? (size_t)of_interpreter.tuple_size(c) : 0));
    default:
        of_interpreter.keep(of_interpreter.none);
        return of_interpreter.none;
    }
}

/* A tuple with another first item. */
static of_object *with_first(of_object *tuple, of_object *item) {
    of_object *const list = of_interpreter.new_list(0);
    of_object *other = NULL;
    const ssize_t n = of_interpreter.tuple_size(tuple);
    bool all = list && of_interpreter.append(list, item) == 0;
    for (ssize_t i = 1; all && i < n; i++)
        all = of_interpreter.append(list, of_interpreter.tuple_item(tuple, i)) == 0;
    if (all)
        other = of_interpreter.tuple_of(list);
    if (list)
        of_interpreter.drop(list);
    return other;
}

/* Likewise of an array: values of keywords are behind the n that are counted. */
static of_object *call_stock_on_array(const changed *f, of_object *other, of_object *self,
                                      of_object *const *values, void *n, void *names) {
    if (!n)
        return f->stock(self, (void *)values, n, names);
    const size_t all =
        (size_t)n + (f->kind & KEYWORDS && names ? (size_t)of_interpreter.tuple_size(names) : 0);
    of_object **const others = malloc(all * sizeof *others);
    if (!others)
        return of_interpreter.no_memory();
    memcpy(others, values, all * sizeof *others);
    others[0] = other;
    of_object *const result = f->stock(self, others, n, names);
    free(others);
    return result;
}

/* The function, with `other` in the place of its first argument; NULL or None: with that. */
static of_object *call_stock(const changed *f, of_object *other, of_object *self, void *a, void *b,
                             void *c) {
    if (!other || other == of_interpreter.none)
        return f->stock(self, a, b, c);
    if (f->is_method)
        return f->stock(other, a, b, c);
    if ((f->kind & ~KEYWORDS) == ONE)
        return f->stock(self, other, b, c);
    if ((f->kind & ~KEYWORDS) == ARRAY)
        return call_stock_on_array(f, other, self, a, b, c);
    if ((f->kind & ~KEYWORDS) != TUPLE || of_interpreter.tuple_size(a) == 0)
        return f->stock(self, a, b, c);
    of_object *const others = with_first(a, other);
    of_object *const result = others ? f->stock(self, others, b, c) : NULL;
    if (others)
        of_interpreter.drop(others);
    return result;
}

static of_object *first_then_stock(const changed *f, of_object *self, void *a, void *b, void *c) {
    of_object *const other =
        f->is_method ? of_interpreter.call_objects(f->first, self, NULL) : NULL;
    if (f->is_method && !other)
        return NULL;
    of_object *const made = call_with_arguments(f, a, b, c);
    of_object *result = NULL;
    if (made) {
        result = call_stock(f, f->is_method ? other : made, self, a, b, c);
        of_interpreter.drop(made);
    }
    if (other)
        of_interpreter.drop(other);
    return result;
}

/* A record has no room for more than the address of a function: each gets one of its own. */
#define EIGHT(X, i) X(i##0) X(i##1) X(i##2) X(i##3) X(i##4) X(i##5) X(i##6) X(i##7)
#define EACH(X) EIGHT(X, 0) EIGHT(X, 01) EIGHT(X, 02) EIGHT(X, 03) /* octal numbers */
static changed changes[32];
static size_t n_changed;
#define CALLING(i)                                                                                 \
    static of_object *calling_##i(of_object *self, void *a, void *b, void *c) {                    \
        return first_then_stock(&changes[i], self, a, b, c);                                       \
    }
EACH(CALLING)
#define NAME_OF(i) calling_##i,
static const c_function callings[] = {EACH(NAME_OF)};
#undef EACH
#undef EIGHT
#undef CALLING
#undef NAME_OF
_Static_assert(sizeof callings / sizeof *callings == sizeof changes / sizeof *changes,
               "one function each");

/* PyMethodDescrObject and PyCFunctionObject: the record comes after the object's head, and in a
 * method after its class and two names. */
static record *record_of(void *of, const char *name, size_t head_bytes, bool is_method) {
    record *found;
    memcpy(&found, (char *)of + head_bytes + (is_method ? 3 : 0) * sizeof(void *), sizeof found);
    return strcmp(found->name, name) == 0 ? found : NULL;
}

int of_shim_call_first(void *of, const char *name, size_t head_bytes, bool is_method, void *first) {
    record *const found = record_of(of, name, head_bytes, is_method);
    const int kind = found ? found->flags & ~COEXISTS : 0;
    const bool is_known = kind == NO_ARGUMENTS || kind == ONE || kind == TUPLE || kind == ARRAY ||
                          kind == (TUPLE | KEYWORDS) || kind == (ARRAY | KEYWORDS);
    if (!is_known) {
        of_set_error("%s is called in a way that optfuse does not know", name);
        return OF_REFUSED;
    }
    if (n_changed == sizeof changes / sizeof *changes) {
        of_set_error("no function is left that could come before %s", name);
        return OF_REFUSED;
    }
    of_interpreter.keep(first);
    changes[n_changed] = (changed){found->call, first, kind, is_method};
    found->call = callings[n_changed++];
    return OF_OK;
}
