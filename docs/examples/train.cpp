// SPDX-License-Identifier: BSD-3-Clause
// train.cpp: trains a small net with a fused AdamW, without Python. Any argument: backward mode.
#include <torch/torch.h>

#include <optfuse/optfuse.hpp>

#include <iostream>

int main(int argc, char **) {
    torch::manual_seed(0);
    torch::nn::Sequential net(torch::nn::Linear(32, 64), torch::nn::ReLU(),
                              torch::nn::Linear(64, 1));
    torch::optim::AdamW opt(net->parameters(), torch::optim::AdamWOptions(1e-2));
    torch::optim::StepLR schedule(opt, 50, 0.5);
    const auto mode = argc > 1 ? optfuse::Mode::backward : optfuse::Mode::forward;
    try {
        optfuse::Fused fused = optfuse::fuse(opt, mode);
        torch::Tensor loss;
        for (int step = 0; step < 100; step++) {
            const torch::Tensor x = torch::randn({16, 32});
            fused.zero_grad();
            loss = (net->forward(x) - x.sum(1, true)).square().mean();
            loss.backward();
            fused.step();
            schedule.step();
        }
        fused.flush(); // saving reads memory by its address
        torch::save(net, "net.pt");
        torch::save(opt, "opt.pt");
        std::cout << "loss " << loss.item<float>() << ", " << fused.counts().created
                  << " updates\n";
    } catch (const optfuse::Error &error) {
        std::cerr << error.what() << "\n";
        return 1;
    }
}
