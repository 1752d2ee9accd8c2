// SPDX-License-Identifier: BSD-3-Clause
#include "cxx/fused.h"

#include <torch/version.h>

#include <memory>

#include "base/error.h"
#include "clipping/pending.h"
#include "cxx/optimizer.h"
#include "cxx/spelling.h"
#include "doors/start.h"
#include "python/gil.h"

using optfuse::FusedOptimizer;

namespace {

constexpr uint32_t kRelease = TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR;

FusedOptimizer *optimizer_of(of_shim_fused *fused) {
    return reinterpret_cast<FusedOptimizer *>(fused);
}

// An extension of Python comes with the GIL, which another thread's update may need.
template <typename Work> int status_of(const Work &work) {
    const optfuse::WithoutGil wait;
    try {
        work();
        return OF_OK;
    } catch (const c10::Error &e) {
        of_set_error("optfuse: %s", e.what_without_backtrace());
    } catch (const std::exception &e) {
        of_set_error("%s", optfuse::in_cxx(e.what()).c_str());
    }
    return OF_REFUSED;
}

void check_build(const of_shim_fuse_options *options) {
    const auto release = options->torch_release;
    if (options->struct_size != sizeof *options || options->abi_version != OF_ABI_VERSION)
        optfuse::fail("optfuse: the program was compiled with the headers of another optfuse than "
                      "the library that it has loaded: compile it again");
    if (release != kRelease)
        optfuse::fail("optfuse: the program was compiled with the headers of torch " +
                      std::to_string(release / 100) + "." + std::to_string(release % 100) +
                      ", and this library was built for torch " + std::to_string(kRelease / 100) +
                      "." + std::to_string(kRelease % 100) +
                      ": build both with the torch that the program runs with");
}

} // namespace

extern "C" {

int of_shim_fuse(void *optimizer, const of_shim_fuse_options *options, of_shim_fused **out) {
    return status_of([&] {
        check_build(options);
        optfuse::check(optfuse::start());
        auto &its = *static_cast<torch::optim::Optimizer *>(optimizer);
        *out = reinterpret_cast<of_shim_fused *>(new FusedOptimizer(its, *options));
    });
}

void of_shim_fused_free(of_shim_fused *fused) {
    const optfuse::WithoutGil wait;
    delete optimizer_of(fused);
}

int of_shim_fused_step(of_shim_fused *fused) {
    return status_of([&] { optimizer_of(fused)->step(); });
}

int of_shim_fused_zero_grad(of_shim_fused *fused, bool set_to_none) {
    return status_of([&] { optimizer_of(fused)->zero_grad(set_to_none); });
}

int of_shim_fused_flush(of_shim_fused *fused) {
    return status_of([&] { optimizer_of(fused)->flush(); });
}

void of_shim_fused_add_only(of_shim_fused *fused, int entered) {
    of_shim_add_only(optimizer_of(fused)->plan(), entered);
}

int of_shim_clip_grad_norm(const void *parameters, size_t n, double max_norm,
                           bool error_if_nonfinite, double *norm, bool *done) {
    *done = false;
    return status_of([&] {
        const auto *first = static_cast<const at::Tensor *>(parameters);
        const auto clipped = optfuse::clip_norm({first, first + n}, max_norm, 2.0,
                                                error_if_nonfinite, optfuse::Language::CXX);
        if (!clipped)
            return;
        *norm = clipped->norm.item<double>();
        *done = true;
    });
}

int of_shim_fused_counts(of_shim_fused *fused, of_counts *out) {
    return of_shim_counts(optimizer_of(fused)->plan(), out);
}

} // extern "C"
