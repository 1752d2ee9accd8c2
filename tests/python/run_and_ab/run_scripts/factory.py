# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers by their names, in a list, and from one another."""

import torch
from common_net import Net, show, train

NAMES = {
    "Adam": {"fused": True},
    "SGD": {"fused": True, "momentum": 0.9},
    "RMSprop": {"foreach": False},
}


def build(name, params):
    return getattr(torch.optim, name)(params, lr=1e-2, **NAMES[name])


nets = [Net(seed) for seed in range(len(NAMES))]
optimizers = [build(*pair) for pair in zip(NAMES, (net.parameters() for net in nets), strict=False)]
for net, optimizer in zip(nets, optimizers, strict=False):
    train(net, optimizer)
    show(net, optimizer)
    anew = type(optimizer)(
        [torch.nn.Parameter(p.detach().clone()) for p in net.parameters()], lr=0.5
    )
    print(
        anew.param_groups[0]["lr"],
        len(anew.param_groups),
        len(anew.state),
        isinstance(anew, getattr(torch.optim, type(optimizer).__name__)),
    )
