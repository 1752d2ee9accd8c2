/* SPDX-License-Identifier: BSD-3-Clause */
/* fused.h: the C ABI between optfuse.hpp, which every program compiles for itself, and the
 * library. Programs include optfuse.hpp.
 *
 * No exception leaves these functions. Those that return an int give an of_status; on anything
 * but 0 of_error_message() says what happened. */
#ifndef OPTFUSE_SHIM_FUSED_H
#define OPTFUSE_SHIM_FUSED_H

#include "optfuse.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct of_shim_fused of_shim_fused;

typedef struct of_shim_fuse_options {
    uint32_t struct_size;   /* sizeof(of_shim_fuse_options) of the program's build */
    uint32_t abi_version;   /* OF_ABI_VERSION of the headers that it includes */
    uint32_t torch_release; /* of torch's headers: major * 100 + minor */
    of_mode mode;
    size_t accumulate;   /* of_plan_options.passes */
    size_t bucket_bytes; /* of_plan_options.bucket_bytes, of all devices; 0: the default */
    bool strict;         /* refuse other bits than docs/cxx.md says */
} of_shim_fuse_options;

/* optimizer: a torch::optim::Optimizer *, borrowed. The caller owns *out. */
OF_API int of_shim_fuse(void *optimizer, const of_shim_fuse_options *options, of_shim_fused **out);
/* Launches what is pending. Does not look at the optimizer, which may be gone. */
OF_API void of_shim_fused_free(of_shim_fused *fused);
OF_API int of_shim_fused_step(of_shim_fused *fused);
OF_API int of_shim_fused_zero_grad(of_shim_fused *fused, bool set_to_none);
OF_API int of_shim_fused_flush(of_shim_fused *fused);
/* of_plan_add_only(). */
OF_API void of_shim_fused_add_only(of_shim_fused *fused, int entered);
OF_API int of_shim_fused_counts(of_shim_fused *fused, of_counts *out);
/* Clips the gradients of parameters, n torch::Tensor, to a total 2-norm, as
 * torch::nn::utils::clip_grad_norm_() does. *done is false, and nothing was changed, if they are
 * not all of optimizers fused in forward mode, on the CPU and of one dtype, if none has a gradient,
 * or if error_if_nonfinite has an error to raise. */
OF_API int of_shim_clip_grad_norm(const void *parameters, size_t n, double max_norm,
                                  bool error_if_nonfinite, double *norm, bool *done);

#ifdef __cplusplus
}
#endif
#endif
