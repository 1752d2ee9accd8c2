// SPDX-License-Identifier: BSD-3-Clause
// clipping.cpp: optfuse::clip_grad_norm_() beside torch::nn::utils::clip_grad_norm_(): norms,
// gradients and weights have the same bits.
#include "optfuse.hpp"

#include "common.h"
#include "tests.h"

#include <cmath>
#include <limits>

namespace {

using torch::Tensor;

constexpr double kMaxNorm = 0.05; // far below every norm here
constexpr double kInf = std::numeric_limits<double>::infinity();

// One gradient of each is multiplied at once, and one large enough to be left to the update.
std::vector<Tensor> parameters(torch::Dtype dtype) {
    torch::manual_seed(3);
    std::vector<Tensor> made;
    for (const int64_t n : {7, 1003, 20000})
        made.push_back(torch::randn({n}).to(dtype).requires_grad_());
    return made;
}

void give_gradients(std::vector<Tensor> &params, int step) {
    torch::manual_seed(100 + step);
    for (Tensor &p : params)
        p.mutable_grad() = torch::randn(p.sizes()).to(p.scalar_type());
}

void train(torch::Dtype dtype, double norm_type, optfuse::Mode mode) {
    const std::string what = std::string("clipping ") + c10::toString(dtype) + " by norm " +
                             std::to_string(norm_type) +
                             (mode == optfuse::Mode::backward ? " in backward mode" : "");
    std::vector<Tensor> ours = parameters(dtype), theirs = parameters(dtype);
    torch::optim::AdamW our_opt(ours), their_opt(theirs);
    optfuse::Fused fused = optfuse::fuse(our_opt, mode),
                   same = optfuse::fuse(their_opt, optfuse::Mode::backward);
    for (int step = 0; step < 12; step++) {
        give_gradients(ours, step);
        give_gradients(theirs, step);
        const double norm = optfuse::clip_grad_norm_(ours, kMaxNorm, norm_type);
        // These are in backward mode, so that both are torch's.
        expect(norm == torch::nn::utils::clip_grad_norm_(theirs, kMaxNorm, norm_type),
               what + ": the norm has its bits");
        if (step % 2 == 1)
            for (size_t i = 0; i < ours.size(); i++)
                expect(same_bits(ours[i].grad(), theirs[i].grad()), what + ": gradients have");
        fused.step();
        same.step();
    }
    for (size_t i = 0; i < ours.size(); i++)
        expect(same_bits(ours[i], theirs[i]), what + ": weights have");
}

void test_nonfinite() {
    std::vector<Tensor> params = parameters(torch::kFloat32);
    torch::optim::SGD opt(params, torch::optim::SGDOptions(0.1));
    optfuse::Fused fused = optfuse::fuse(opt);
    give_gradients(params, 0);
    params[1].mutable_grad().index_put_({5}, kInf);
    const Tensor before = params[0].grad().clone();
    bool thrown = false;
    try {
        optfuse::clip_grad_norm_(params, kMaxNorm, 2.0, true);
    } catch (const c10::Error &e) {
        thrown = std::string(e.what()).find("is non-finite") != std::string::npos;
    }
    expect(thrown, "a norm that is not finite throws what torch's function throws");
    expect(same_bits(params[0].grad(), before), "and changes no gradient");
    expect(std::isinf(optfuse::clip_grad_norm_(params, kMaxNorm)), "it is returned otherwise");
}

// That large gradients were left to the update shows in memory alone.
void test_one_call() {
    std::vector<Tensor> params = parameters(torch::kFloat32);
    torch::optim::SGD opt(params, torch::optim::SGDOptions(0.1));
    optfuse::Fused fused = optfuse::fuse(opt);
    give_gradients(params, 0);
    const float *large = params[2].grad().const_data_ptr<float>();
    const float before = large[0];
    optfuse::clip_grad_norm_(params, kMaxNorm);
    expect(large[0] == before, "a large gradient is not written");
    expect(params[2].grad()[0].item<float>() != before, "and whoever looks finds it clipped");
    expect(optfuse::clip_grad_norm_(params[0], kMaxNorm) > 0, "one parameter has one");
    expect(optfuse::clip_grad_norm_(std::vector<Tensor>(), kMaxNorm) == 0,
           "no parameters have no norm");
}

} // namespace

void test_clipping() {
    for (const auto dtype : {torch::kFloat32, torch::kFloat64, torch::kBFloat16, torch::kHalf})
        for (const double norm_type : {2.0, 1.0, kInf})
            for (const auto mode : {optfuse::Mode::forward, optfuse::Mode::backward})
                train(dtype, norm_type, mode);
    test_nonfinite();
    test_one_call();
}
