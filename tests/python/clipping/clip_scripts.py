# SPDX-License-Identifier: BSD-3-Clause
"""Shared by the tests of clipping."""

import copy

import torch
from common import adamw, batch, loss_of, net, train
from torch import nn

import optfuse

TIGHT = 0.05  # far below every norm here
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def clip(wrap, parameters, max_norm=TIGHT, *args, **options):
    function = optfuse.clip_grad_norm_ if wrap.fused else nn.utils.clip_grad_norm_
    return function(parameters, max_norm, *args, **options)


def long_net(dtype=torch.float32):
    """Parameters of more than one block of the kernels, and with tails."""
    return nn.Sequential(nn.Linear(33, 70), nn.Tanh(), nn.Linear(70, 3)).to(dtype)


def backward(model, i, dtype=torch.float32):
    x, y = batch(i, inputs=33)
    (model(x.to(dtype)) - y.to(dtype)).square().mean().backward()


def model_to_clip():
    torch.manual_seed(0)
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    train(model, optimizer, 9)  # makes the state
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    return model, optimizer


def twin_of(model):
    twin = copy.deepcopy(model)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        q.grad = p.grad.clone()
    return twin
