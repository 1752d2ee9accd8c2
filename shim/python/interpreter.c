/* SPDX-License-Identifier: BSD-3-Clause */
/* interpreter.c: looks Python's functions up in the process. */
#include "python/interpreter.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>

#include "optfuse.h"

static const struct {
    const char *name;
    size_t offset; /* of its pointer in of_python */
} python_names[] = {
    {"PyGILState_Ensure", offsetof(of_python, take_gil)},
    {"PyGILState_Release", offsetof(of_python, give_gil)},
    {"PyGILState_Check", offsetof(of_python, holds_gil)},
    {"PyGILState_GetThisThreadState", offsetof(of_python, this_thread)},
    {"PyEval_SaveThread", offsetof(of_python, save_thread)},
    {"PyEval_RestoreThread", offsetof(of_python, restore_thread)},
    {"PyObject_CallFunction", offsetof(of_python, call)},
    {"PyErr_CheckSignals", offsetof(of_python, run_signal_handlers)},
    {"Py_IncRef", offsetof(of_python, keep)},
    {"Py_DecRef", offsetof(of_python, drop)},
    {"PyLong_AsLong", offsetof(of_python, number)},
    {"PyObject_Type", offsetof(of_python, type_of)},
    {"PyObject_Str", offsetof(of_python, str)},
    {"PyObject_GetAttrString", offsetof(of_python, attribute)},
    {"PyUnicode_AsUTF8AndSize", offsetof(of_python, utf8)},
    {"PyErr_Fetch", offsetof(of_python, fetch)},
    {"PyErr_Restore", offsetof(of_python, restore)},
    {"PyErr_NormalizeException", offsetof(of_python, normalize)},
    {"PyErr_Clear", offsetof(of_python, clear)},
    {"PyErr_GivenExceptionMatches", offsetof(of_python, matches)},
    {"PyDict_Next", offsetof(of_python, dict_next)},
    {"PyList_Size", offsetof(of_python, list_size)},
    {"PyList_GetItem", offsetof(of_python, list_item)},
    {"PyExc_Exception", offsetof(of_python, exception)},
    {"PyExc_KeyboardInterrupt", offsetof(of_python, interrupt)},
    {"PyDict_Type", offsetof(of_python, dict_type)},
    {"_Py_NoneStruct", offsetof(of_python, none)},
};

static pthread_once_t looked_up = PTHREAD_ONCE_INIT;
of_python of_interpreter;
static const char *absent;

static void look_up_python(void) {
    for (size_t i = 0; i < sizeof python_names / sizeof *python_names; i++) {
        void *const found = dlsym(RTLD_DEFAULT, python_names[i].name);
        if (!found)
            absent = python_names[i].name;
        memcpy((char *)&of_interpreter + python_names[i].offset, &found, sizeof found);
    }
}

bool of_python_find(void) {
    pthread_once(&looked_up, look_up_python);
    if (absent)
        of_set_error("this process has no %s: optfuse needs the CPython that PyTorch was built for",
                     absent);
    return !absent;
}
