/* SPDX-License-Identifier: BSD-3-Clause */
/* asgd_next.c: launches what follows an update that has numbers on the device. */
#include <string.h>

#include "images.h"
#include "launch.h"
#include "rules/asgd_foreach.h"

of_cuda_status of_cuda_next_numbers(const of_driver *driver, const of_gpu_update *update,
                             const of_gpu_entry *entries, size_t n_entries) {
    asgd_foreach_scalars s;
    CUkernel kernel = NULL;
    of_cuda_status status = of_cuda_find_single(driver, OF_CUDA_ASGD_NEXT, &kernel);
    memcpy(&s, update->hyper, sizeof s);
    of_cuda_numbers table = {.lr = s.lr, .growth = s.growth, .alpha = s.alpha, .t0 = s.t0};
    for (size_t i = 0; i < n_entries && status == OF_CUDA_OK; i++) {
        const of_gpu_entry *e = &entries[i];
        table.at[table.n].step = e->step_at;
        table.at[table.n].eta = e->numbers_at[asgd_eta];
        table.at[table.n++].mu = e->numbers_at[asgd_mu];
        if (table.n < OF_CUDA_NUMBERS && i + 1 < n_entries)
            continue;
        status = of_cuda_launch_single(driver, kernel, &table, table.n, update->stream);
        table.n = 0;
    }
    return status;
}
