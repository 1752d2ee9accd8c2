/* SPDX-License-Identifier: BSD-3-Clause */
/* interpreter.h: the functions of Python that the shim calls. Nothing of Python is
 * linked: the process has them. All but _Py_NoneStruct are of the stable ABI. */
#ifndef OPTFUSE_SHIM_INTERPRETER_H
#define OPTFUSE_SHIM_INTERPRETER_H

#include <stdbool.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

struct _object;

/* Named after what they do; interpreter.c has Python's own names. */
typedef struct of_python {
    int (*take_gil)(void);
    void (*give_gil)(int state);
    int (*holds_gil)(void);
    void *(*this_thread)(void);
    void *(*save_thread)(void);
    void (*restore_thread)(void *thread);
    struct _object *(*call)(struct _object *callable, const char *format, ...);
    int (*run_signal_handlers)(void);
    void (*keep)(struct _object *object);
    void (*drop)(struct _object *object);
    long (*number)(struct _object *object);
    struct _object *(*type_of)(struct _object *object); /* a new reference */
    struct _object *(*str)(struct _object *object);
    struct _object *(*attribute)(struct _object *object, const char *name);
    const char *(*utf8)(struct _object *text, ssize_t *length);
    void (*fetch)(struct _object **type, struct _object **value, struct _object **trace);
    void (*restore)(struct _object *type, struct _object *value, struct _object *trace);
    void (*normalize)(struct _object **type, struct _object **value, struct _object **trace);
    void (*clear)(void);
    int (*matches)(struct _object *type, struct _object *other);
    int (*dict_next)(struct _object *dict, ssize_t *position, struct _object **key,
                     struct _object **value);
    ssize_t (*list_size)(struct _object *list);
    struct _object *(*list_item)(struct _object *list, ssize_t i); /* borrowed */
    struct _object **exception, **interrupt;
    struct _object *dict_type, *none;
} of_python;

extern of_python of_interpreter; /* all zero before of_python_find() */

/* Looks them up at the first call, from any thread. False after of_set_error(): the
 * process lacks one of them. */
bool of_python_find(void);

#ifdef __cplusplus
}
#endif
#endif
