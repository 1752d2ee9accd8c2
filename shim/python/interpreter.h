/* SPDX-License-Identifier: BSD-3-Clause */
/* interpreter.h: the functions of Python that the shim calls. Nothing of Python is
 * linked: the process has them. All but _Py_NoneStruct are of the stable ABI of Python 3.10. */
#ifndef OPTFUSE_SHIM_INTERPRETER_H
#define OPTFUSE_SHIM_INTERPRETER_H

#include <stdbool.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct _object of_object;

/* Python's name of each, and here a name for what it does. */
#define OF_PYTHON(X)                                                                               \
    X("PyGILState_Ensure", int (*take_gil)(void))                                                  \
    X("PyGILState_Release", void (*give_gil)(int state))                                           \
    X("PyGILState_Check", int (*holds_gil)(void))                                                  \
    X("PyGILState_GetThisThreadState", void *(*this_thread)(void))                                 \
    X("PyEval_SaveThread", void *(*save_thread)(void))                                             \
    X("PyEval_RestoreThread", void (*restore_thread)(void *thread))                                \
    X("PyObject_CallFunction", of_object *(*call)(of_object * callable, const char *format, ...))  \
    X("PyObject_Call",                                                                             \
      of_object *(*call_with)(of_object * callable, of_object * tuple, of_object * keywords))      \
    X("PyObject_CallMethod",                                                                       \
      of_object *(*call_method)(of_object * object, const char *name, const char *format, ...))    \
    X("PyObject_CallFunctionObjArgs",                                                              \
      of_object *(*call_objects)(of_object * callable, ... /* NULL at the end */))                 \
    X("Py_AddPendingCall", int (*call_later)(int (*function)(void *), void *argument))             \
    X("PyErr_CheckSignals", int (*run_signal_handlers)(void))                                      \
    X("Py_IncRef", void (*keep)(of_object * object))                                               \
    X("Py_DecRef", void (*drop)(of_object * object))                                               \
    X("PyLong_AsLong", long (*number)(of_object * object))                                         \
    X("PyObject_Type", of_object *(*type_of)(of_object * object) /* a new reference */)            \
    X("PyObject_Str", of_object *(*str)(of_object * object))                                       \
    X("PyObject_GetAttrString", of_object *(*attribute)(of_object * object, const char *name))     \
    X("PyObject_GetAttr", of_object *(*attribute_of)(of_object * object, of_object * name))        \
    X("PyUnicode_AsUTF8AndSize", const char *(*utf8)(of_object * text, ssize_t * length))          \
    X("PyErr_Fetch", void (*fetch)(of_object * *type, of_object * *value, of_object * *trace))     \
    X("PyErr_Restore", void (*restore)(of_object * type, of_object * value, of_object * trace))    \
    X("PyErr_NormalizeException",                                                                  \
      void (*normalize)(of_object * *type, of_object * *value, of_object * *trace))                \
    X("PyErr_Clear", void (*clear)(void))                                                          \
    X("PyErr_GivenExceptionMatches", int (*matches)(of_object * type, of_object * other))          \
    X("PyDict_Next", int (*dict_next)(of_object * dict, ssize_t * position, of_object * *key,      \
                                      of_object * *value))                                         \
    X("PyDict_Size", ssize_t (*dict_size)(of_object * dict))                                       \
    X("PyType_IsSubtype", int (*is_subtype)(of_object * type, of_object * base))                   \
    X("PyList_Size", ssize_t (*list_size)(of_object * list))                                       \
    X("PyList_GetItem", of_object *(*list_item)(of_object * list, ssize_t i) /* borrowed */)       \
    X("PyDict_GetItemString",                                                                      \
      of_object *(*dict_item)(of_object * dict, const char *key) /* borrowed */)                   \
    X("PyDict_GetItem",                                                                            \
      of_object *(*dict_value)(of_object * dict, of_object *key) /* borrowed; clears errors */)    \
    X("PyMapping_GetItemString", of_object *(*item)(of_object * mapping, const char *key))         \
    X("PyList_New", of_object *(*new_list)(ssize_t size))                                          \
    X("PyList_Append", int (*append)(of_object * list, of_object * item))                          \
    X("PySequence_List", of_object *(*list_of)(of_object * iterable))                              \
    X("PyList_AsTuple", of_object *(*tuple_of)(of_object * list))                                  \
    X("PyTuple_Size", ssize_t (*tuple_size)(of_object * tuple))                                    \
    X("PyTuple_GetItem", of_object *(*tuple_item)(of_object * tuple, ssize_t i) /* borrowed */)    \
    X("PySet_Size", ssize_t (*set_size)(of_object * set))                                          \
    X("PyFloat_AsDouble", double (*real)(of_object * object))                                      \
    X("PyObject_IsTrue", int (*is_true)(of_object * object))                                       \
    X("PyObject_SetAttrString",                                                                    \
      int (*set_attribute)(of_object * object, const char *name, of_object *value))                \
    X("PyBool_FromLong", of_object *(*boolean)(long value))                                        \
    X("PyErr_Occurred", of_object *(*raised)(void)/* borrowed */)                                  \
    X("PyErr_SetString", void (*raise)(of_object * type, const char *text))                        \
    X("PyGC_Disable", int (*pause_gc)(void) /* whether it was on */)                               \
    X("PyGC_Enable", int (*resume_gc)(void))                                                       \
    X("PyErr_NoMemory", of_object *(*no_memory)(void) /* NULL */)                                  \
    X("PyExc_Exception", of_object **exception)                                                    \
    X("PyExc_KeyboardInterrupt", of_object **interrupt)                                            \
    X("PyDict_Type", of_object *dict_type)                                                         \
    X("PyList_Type", of_object *list_type)                                                         \
    X("_Py_NoneStruct", of_object *none)

#define OF_PYTHON_MEMBER(name, member) member;
typedef struct of_python {
    OF_PYTHON(OF_PYTHON_MEMBER)
} of_python;

extern of_python of_interpreter; /* all zero before of_python_find() */

/* Looks them up at the first call, from any thread. False after of_set_error(): the
 * process lacks one of them. */
bool of_python_find(void);

#ifdef __cplusplus
}
#endif
#endif
