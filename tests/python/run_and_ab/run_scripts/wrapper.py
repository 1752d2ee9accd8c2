# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers that have another one: a Lookahead that makes it, a Lookahead that is given it, and a
wrapper that is no optimizer."""

import torch
from common_net import Net, digest, train


class Lookahead(torch.optim.Optimizer):
    """Every second step the weights go half of the way back."""

    def __init__(self, params, lr=1e-2, inner=None):
        params = list(params)
        self.inner = inner or torch.optim.Adam(params, lr=lr, fused=True)
        super().__init__(params, {"lr": lr})
        self.slow = [param.detach().clone() for param in params]
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for param, slow in zip(self.param_groups[0]["params"], self.slow, strict=False):
                slow.lerp_(param, 0.5)
                param.copy_(slow)


class Wrapped:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.optimizer.step()


for make in (
    Lookahead,
    lambda params: Lookahead(
        params := list(params), inner=torch.optim.Adam(params, lr=1e-2, fused=True)
    ),
    lambda params: Wrapped(torch.optim.Adam(params, lr=1e-2, fused=True)),
):
    net = Net()
    train(net, make(net.parameters()))
    print(digest(net.parameters()))
