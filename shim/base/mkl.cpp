// SPDX-License-Identifier: BSD-3-Clause
#include "base/mkl.h"

#include <dlfcn.h>

namespace optfuse {
namespace {

using SetThreadsOfMkl = int (*)(int n); // of the calling thread; returns what it was

SetThreadsOfMkl set_threads() {
    static const auto found = function_of_mkl<SetThreadsOfMkl>("MKL_Set_Num_Threads_Local");
    return found;
}

thread_local bool mkl_is_alone = false;

} // namespace

void *find_in_libtorch(const char *name) {
    void *library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    return library != nullptr ? dlsym(library, name) : nullptr;
}

int SerialMkl::threads() {
    static const auto found = function_of_mkl<int (*)()>("MKL_Get_Max_Threads");
    return found == nullptr ? 0 : found();
}

void SerialMkl::forget_threads() {
    if (set_threads() != nullptr)
        set_threads()(0);
}

bool SerialMkl::is_possible() {
    return set_threads() != nullptr;
}

// A parallel region for a few hundred roots costs more than the roots, even one that has a
// single thread because it is inside of another region.
SerialMkl::SerialMkl() : outermost(!mkl_is_alone && set_threads() != nullptr) {
    if (!outermost)
        return;
    before = set_threads()(1);
    mkl_is_alone = true;
}

SerialMkl::~SerialMkl() {
    if (!outermost)
        return;
    set_threads()(before);
    mkl_is_alone = false;
}

} // namespace optfuse
