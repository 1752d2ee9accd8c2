// SPDX-License-Identifier: BSD-3-Clause
// optfuse.hpp: fuses the optimizers of C++ programs that train with libtorch.
//
//   torch::optim::AdamW opt(net->parameters(), torch::optim::AdamWOptions(3e-4));
//   optfuse::Fused fused = optfuse::fuse(opt);  // or optfuse::Mode::backward
//   for (...) {
//       fused.zero_grad();
//       loss_of(net).backward();
//       fused.step();
//   }
//   fused.flush();
//   torch::save(net, "net.pt");
//   torch::save(opt, "opt.pt");
//
// Needs no Python in the process.
#pragma once

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim.h>
#include <torch/version.h>

#include <memory>
#include <string>
#include <vector>

#include "error.hpp"
#include "fused.h"

namespace optfuse {

enum class Mode {
    forward, // on the CPU step() leaves updates pending until the first use of each parameter
    backward // each update runs inside backward(), and frees the gradient
};

struct Options {
    Mode mode = Mode::forward;
    size_t accumulate = 1;   // Mode::backward: how many backward passes make one step
    size_t bucket_bytes = 0; // of small updates that run together; 0: the default
    bool strict = false;     // throw where the bits are others than docs/cxx.md says
};

namespace detail {

inline void check(int status) {
    if (status != OF_OK)
        throw Error(of_error_message());
}

struct Free {
    void operator()(of_shim_fused *fused) const { of_shim_fused_free(fused); }
};

} // namespace detail

// The fused optimizer that fuse() returns. The optimizer keeps its options and its state: change
// options, load state and add parameter groups there, between two iterations. Call step() and
// zero_grad() here.
//
// Lifetime: the optimizer stays where it is, and outlives the last call of a function of its
// wrapper. Only the wrapper's destructor may come later. It launches what is pending, and the
// optimizer is a stock one again. Parameters live at least as long as their wrapper.
//
// Threads: one at a time, as for the optimizer itself.
class Fused {
  public:
    // As the step() of torch::optim. Throws Error, and then no parameter was updated here.
    torch::Tensor step(const torch::optim::Optimizer::LossClosure &closure = nullptr) {
        torch::Tensor loss;
        if (closure) {
            const at::AutoGradMode enabled(true);
            loss = closure();
        }
        detail::check(of_shim_fused_step(fused.get()));
        return loss;
    }

    // Mode::backward: comes after step(), and throws Error before it.
    void zero_grad(bool set_to_none = true) {
        detail::check(of_shim_fused_zero_grad(fused.get(), set_to_none));
    }

    // Launches what is pending. Operators do so by themselves; call it before the address of a
    // parameter, gradient or state tensor is taken (data_ptr(), accessor(), torch::save(),
    // from_blob of an earlier address).
    void flush() { detail::check(of_shim_fused_flush(fused.get())); }

    // The counts of updates so far (optfuse.h).
    of_counts counts() const {
        of_counts found = {};
        detail::check(of_shim_fused_counts(fused.get(), &found));
        return found;
    }

  private:
    explicit Fused(of_shim_fused *owned) : fused(owned) {}
    friend Fused fuse(torch::optim::Optimizer &optimizer, const Options &options);
    friend class Accumulate;
    std::unique_ptr<of_shim_fused, detail::Free> fused;
};

// Mode::backward: as long as one exists, backward passes of this optimizer only add to the
// gradients.
class Accumulate {
  public:
    explicit Accumulate(Fused &its) : fused(its.fused.get()) { of_shim_fused_add_only(fused, +1); }
    ~Accumulate() { of_shim_fused_add_only(fused, -1); }
    Accumulate(const Accumulate &) = delete;
    Accumulate &operator=(const Accumulate &) = delete;

  private:
    of_shim_fused *fused;
};

// Throws Error, with nothing changed, if the optimizer can't be fused.
inline Fused fuse(torch::optim::Optimizer &optimizer, const Options &options) {
    of_shim_fuse_options told = {};
    told.struct_size = sizeof told;
    told.abi_version = OF_ABI_VERSION;
    told.torch_release = TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR;
    told.mode = options.mode == Mode::backward ? OF_BACKWARD : OF_FORWARD;
    told.accumulate = options.accumulate;
    told.bucket_bytes = options.bucket_bytes;
    told.strict = options.strict;
    of_shim_fused *fused = nullptr;
    detail::check(of_shim_fuse(&optimizer, &told, &fused));
    return Fused(fused);
}

inline Fused fuse(torch::optim::Optimizer &optimizer, Mode mode = Mode::forward) {
    Options options;
    options.mode = mode;
    return fuse(optimizer, options);
}

// Clips gradients as torch::nn::utils::clip_grad_norm_() does, in place and with its bits. Where
// all parameters are of optimizers fused in forward mode, on the CPU and of one dtype, and the norm
// is the 2-norm, it is one pass, and large gradients are multiplied by the updates that read them.
// Returns the total norm. Throws what torch's throws.
inline double clip_grad_norm_(const std::vector<torch::Tensor> &parameters, double max_norm,
                              double norm_type = 2.0, bool error_if_nonfinite = false) {
    double norm = 0;
    bool done = false;
    if (norm_type == 2.0)
        detail::check(of_shim_clip_grad_norm(parameters.data(), parameters.size(), max_norm,
                                             error_if_nonfinite, &norm, &done));
    return done ? norm
                : torch::nn::utils::clip_grad_norm_(parameters, max_norm, norm_type,
                                                    error_if_nonfinite);
}

inline double clip_grad_norm_(const torch::Tensor &parameter, double max_norm,
                              double norm_type = 2.0, bool error_if_nonfinite = false) {
    return clip_grad_norm_(std::vector<torch::Tensor>{parameter}, max_norm, norm_type,
                           error_if_nonfinite);
}

// Launches what is pending of every optimizer.
inline void flush() {
    if (of_flush_all() != OF_OK)
        throw Error(std::string("optfuse: ") + of_error_message());
}

} // namespace optfuse
