# SPDX-License-Identifier: BSD-3-Clause
"""Adafactor and CAME of optfuse.optim with their options, and training with them."""

import pytest
import torch
from torch import nn

from optfuse._rounding import factored
from optfuse.optim import CAME, Adafactor

NARROW = (torch.bfloat16, torch.float16)
SIZES = ((3,), (), (1, 1), (7, 5), (65, 33), (5, 3, 4, 6), (40, 300))
ROUND = {"stochastic_rounding": True}
FIXED = {"lr": 0.01, "relative_step": False, "scale_parameter": False}
OPTIONS = {
    Adafactor: (
        {},
        {"warmup_init": True, "beta1": 0.9, "weight_decay": 0.1},
        {**FIXED, "weight_decay": 0.1, "clip_threshold": 0.5},
        {**FIXED, "scale_parameter": True, "eps": (1e-20, 10.0), "weight_decay": 0.1},
    ),
    CAME: ({"lr": 0.01}, {"lr": 0.01, "weight_decay": 0.1, "clip_threshold": 0.3}),
}
CASES = [(cls, options) for cls in OPTIONS for options in OPTIONS[cls]]
each_case = pytest.mark.parametrize("cls, options", CASES)
each_class = pytest.mark.parametrize("cls", OPTIONS, ids=lambda cls: cls.__name__)
each_narrow = pytest.mark.parametrize("dtype", NARROW)


def params_of(dtype=torch.float32, sizes=SIZES):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def made(cls, dtype=torch.float32, sizes=SIZES, **options):
    params = params_of(dtype, sizes)
    return params, cls(params, **(options or OPTIONS[cls][0]))


def gradient(param, i, step):
    generator = torch.Generator().manual_seed(1000 * step + i)
    return torch.randn(param.shape, generator=generator).to(param.dtype)


def train(optimizer, steps, begin=1):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(begin, begin + steps):
        for i, p in enumerate(params):
            p.grad = gradient(p, i, step)
        optimizer.step()


def results(optimizer):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [(p.detach().clone(), dict(optimizer.state[p])) for p in params]


def by_operator(monkeypatch, does):
    """Whether it makes the updates that it can make."""
    for cls in (Adafactor, CAME):
        monkeypatch.setitem(factored._agree, cls, does)


def watched(monkeypatch):
    """The operator's updates."""
    ran, run = [], factored.Factored._by_operator

    def noted(*update):
        ran.append(update)
        run(*update)

    monkeypatch.setattr(factored.Factored, "_by_operator", noted)
    return ran


def usual(cls, params):
    return cls(params, **(FIXED if cls is Adafactor else {"lr": 0.01}))
