# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers of its own: one that adds an option to a class of torch, one with another step(),
one whose __init__() is in a base that is no optimizer."""

import torch
from common_net import Net, show, train


class Named(torch.optim.SGD):
    def __init__(self, params, name, **options):
        super().__init__(params, **options)
        self.name = name  # after the base's __init__(): not part of a group
        self.param_groups[0]["weight_decay"] = 0.1  # and a group that changes meanwhile


class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["count"] = self.state[param].get("count", 0) + 1
                param.add_(param.grad.sign(), alpha=-group["lr"])


class Halved:
    def __init__(self, params, lr):
        super().__init__(params, lr=lr / 2, fused=True)
        self.param_groups[0]["lr"] = lr / 4


class HalvedAdam(Halved, torch.optim.Adam):
    pass


for make in (
    lambda params: Named(params, "it", lr=1e-2, momentum=0.9, fused=True),
    lambda params: Signs(params, lr=1e-2),
    lambda params: HalvedAdam(params, lr=1e-2),
):
    net = Net()
    optimizer = make(net.parameters())
    train(net, optimizer)
    show(net, optimizer)
    again = type(optimizer)(
        net.parameters(), **({"name": ""} if hasattr(optimizer, "name") else {"lr": 1.0})
    )
    print(again.param_groups[0]["lr"], len(again.param_groups), len(again.state))
