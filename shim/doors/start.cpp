// SPDX-License-Identifier: BSD-3-Clause
#include <pthread.h>

#include <mutex>

#include "absent/awaited.h"
#include "absent/kinds.h"
#include "clipping/late_norm.h"
#include "doors/start.h"
#include "host/first_use.h"
#include "optfuse.h"
#include "plan/slots.h"
#include "promises/promise.h"
#include "python/gil.h"
#include "recorded/tape.h"

namespace optfuse {
namespace {

// A child has none of the threads that complete a reduction, or that multiply.
void prepare_fork() {
    const WithoutGil wait;
    await_arrivals(ALL_GROUPS);
    keep_all_promises();
    of_fork_prepare();
    lock_promises();
    lock_slots();
}

void after_fork_in_parent() {
    unlock_slots();
    unlock_promises();
    of_fork_parent();
}

void after_fork_in_child() {
    unlock_slots();
    unlock_promises();
    of_fork_child();
}

} // namespace

int start() {
    static std::mutex lock; // guards started
    static bool started = false;
    const std::lock_guard<std::mutex> guard(lock);
    if (started)
        return OF_OK;
    const int status = register_first_use();
    if (status != OF_OK)
        return status;
    absent_kinds = {&absent::recorded, &absent::consumed,   &absent::wrapped, &absent::promised,
                    &absent::asked,    &absent::recomputed, &absent::awaited, &absent::late_norm};
    pthread_atfork(prepare_fork, after_fork_in_parent, after_fork_in_child);
    started = true;
    return OF_OK;
}

} // namespace optfuse
