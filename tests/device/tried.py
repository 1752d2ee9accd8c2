# SPDX-License-Identifier: BSD-3-Clause
"""Shared by the tests of kernels that take the place of a class's own step() on a GPU."""

import torch
from gpu import NAME

import optfuse

MODES = ("forward", "backward")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = (1, 7, 64, 1003, 9001)
OWN = {}  # the class's own step() is recorded
KERNELS = {"float32": "cuda"}


class Subclass(torch.nn.Parameter):
    """One of which makes PyTorch take its for-loop."""


def parameters(dtype=torch.float32, sizes=SIZES):
    torch.manual_seed(1)
    return [torch.randn(n, dtype=dtype).to(NAME).requires_grad_() for n in sizes]


def steps(optimizer, params, n, seed=0, backward=False):
    for step in range(n):
        torch.manual_seed(100 * seed + step)
        drawn = [torch.randn(p.shape).to(NAME, p.dtype) for p in params]
        if backward:
            optimizer.zero_grad()
            sum((p * g).sum() for p, g in zip(params, drawn, strict=True)).backward()
        else:
            for p, g in zip(params, drawn, strict=True):
                p.grad = g
        optimizer.step()


def all_of(optimizer, params):
    yield "parameters", params
    yield "state", [dict(optimizer.state[p]) for p in params]


def isa(optimizer):
    return optfuse.summary(optimizer).isa


def with_alpha(optimizer, alpha):
    """Constructors of ASGD refuse a negative one from 2.15 on."""
    optimizer.param_groups[0]["alpha"] = alpha
    return optimizer
