/* SPDX-License-Identifier: BSD-3-Clause */
/* interpreter.c: looks Python's functions up in the process. */
#include "python/interpreter.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "optfuse.h"

#define NAME(name, member) name,
static const char *const names[] = {OF_PYTHON(NAME)};
_Static_assert(sizeof names == sizeof(of_python), "all members are pointers");

static pthread_once_t looked_up = PTHREAD_ONCE_INIT;
of_python of_interpreter;
static const char *absent;

static void look_up_python(void) {
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void *const found = dlsym(RTLD_DEFAULT, names[i]);
        if (!found)
            absent = names[i];
        memcpy((char *)&of_interpreter + i * sizeof found, &found, sizeof found);
    }
}

bool of_python_find(void) {
    pthread_once(&looked_up, look_up_python);
    if (absent)
        of_set_error("this process has no %s: optfuse needs the CPython that PyTorch was built for",
                     absent);
    return !absent;
}
