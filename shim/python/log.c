/* SPDX-License-Identifier: BSD-3-Clause */
/* log.c: a message comes from a thread of backward without the GIL, or from under the lock
 * of a plan, for which a thread with the GIL may wait. So nothing takes the GIL here:
 * Python's pending calls, which are a queue for this, hand the message over. */
#include "python/log.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct said {
    int level;
    char text[];
} said;

static _Atomic(of_object *) receiver;

/* On the main thread, with the GIL. -1: receive() raised what is no Exception, such as Ctrl-C,
 * which came meanwhile and belongs to the program. */
static int hand_over(void *queued) {
    const of_python *python = &of_interpreter;
    said *message = queued;
    of_object *done = python->call(receiver, "is", message->level, message->text);
    free(message);
    if (done) {
        python->drop(done);
        return 0;
    }
    of_object *type = NULL, *value = NULL, *trace = NULL;
    python->fetch(&type, &value, &trace);
    const bool ours = python->matches(type, *python->exception) != 0;
    python->restore(type, value, trace);
    if (ours)
        python->clear();
    return ours ? 0 : -1;
}

static void queue(void *ctx, int level, const char *text) {
    (void)ctx;
    const size_t bytes = strlen(text) + 1;
    said *message = malloc(sizeof *message + bytes);
    if (message) {
        message->level = level;
        memcpy(message->text, text, bytes);
        if (of_interpreter.call_later(hand_over, message) == 0)
            return;
    }
    free(message);
    fprintf(stderr, "optfuse: %s\n", text); /* Python's queue is full */
}

void of_log_to(of_object *receive) {
    receiver = receive;
}

of_log_fn *of_log_function(void) {
    return receiver ? queue : NULL;
}
