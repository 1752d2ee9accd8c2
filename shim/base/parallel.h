// SPDX-License-Identifier: BSD-3-Clause
// parallel.h: work on the threads of PyTorch's OpenMP. at::parallel_for() and at::get_num_threads()
// set the number of threads of a thread that calls them for the first time, and PyTorch's products
// of matrices that come later on that thread round by it. Stock's step() may run elsewhere, or not
// at all by then.
#pragma once

#include <ATen/Parallel.h>
#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace optfuse {

inline int thread_count() {
    return omp_get_max_threads();
}

// Calls work(begin, end) for contiguous ranges of [0, n), one for each thread, none of fewer than
// `least`, and returns when all are done. It must not throw.
template <class Work> void in_parallel(int64_t n, int64_t least, const Work &work) {
    const int64_t most = std::min<int64_t>(thread_count(), (n + least - 1) / least);
    if (most <= 1 || at::in_parallel_region()) {
        const c10::ParallelGuard inside(true);
        if (n > 0)
            work(0, n);
        return;
    }
#pragma omp parallel
    {
        const c10::ParallelGuard inside(true);
        const int64_t threads = std::min<int64_t>(omp_get_num_threads(), most);
        const int64_t range = (n + threads - 1) / threads;
        const int64_t begin = omp_get_thread_num() * range;
        if (begin < n)
            work(begin, std::min(begin + range, n));
    }
}

} // namespace optfuse
