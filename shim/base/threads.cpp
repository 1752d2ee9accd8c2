// SPDX-License-Identifier: BSD-3-Clause
#include "base/threads.h"

#include <exception>
#include <thread>
#include <utility>

#include "base/mkl.h"
#include "base/parallel.h"

namespace optfuse {
namespace {

// This thread's number was set too early, and PyTorch will not set it once more.
thread_local bool owes_threads = false;

} // namespace

void set_owed_threads() {
    if (std::exchange(owes_threads, false))
        at::init_num_threads();
}

void set_threads_as_operators(int64_t numel, int64_t from) {
    if (numel < from)
        return;
    set_owed_threads();
    at::get_num_threads();
}

KeepThreads::KeepThreads() : before(thread_count()) {}

// A thread whose number PyTorch has not set has none of MKL's.
KeepThreads::~KeepThreads() {
    if (thread_count() == before)
        return;
    omp_set_num_threads(before);
    SerialMkl::forget_threads();
    owes_threads = true;
}

bool would_set_threads() {
    int of_new_threads = 0;
    std::thread([&of_new_threads] { of_new_threads = at::get_num_threads(); }).join();
    return of_new_threads != thread_count();
}

void on_another_thread(const std::function<void()> &work) {
    std::exception_ptr failure;
    std::thread other([&work, &failure, threads = thread_count()] {
        try {
            at::get_num_threads(); // no operator sets it any more
            omp_set_num_threads(threads);
            work();
        } catch (...) {
            failure = std::current_exception();
        }
    });
    other.join();
    if (failure)
        std::rethrow_exception(failure);
}

} // namespace optfuse
