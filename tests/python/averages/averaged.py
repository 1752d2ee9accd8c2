# SPDX-License-Identifier: BSD-3-Clause
"""Shared by the tests of averages: what is trained and averaged."""

import contextlib

import torch
from clip_scripts import backward, long_net
from common import (
    adamw,
    everything,
    net,
)
from pytorchs_own import pytorchs_own
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel

import optfuse

STEPS = 5
KINDS = {
    "EMA": lambda: {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "EMA of little decay": lambda: {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.3)},
    "EMA one by one": lambda: {"avg_fn": swa_utils.get_ema_avg_fn(0.99)},
    "SWA": dict,
    "SWA one by one": lambda: {"avg_fn": swa_utils.get_swa_avg_fn()},
    "SWA by its function": lambda: {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
}


def update(wrap, averaged, model):
    with contextlib.nullcontext() if wrap.fused else pytorchs_own():
        averaged.update_parameters(model)


def averaged_net(wrap, kind="EMA"):
    """A model, its optimizer and its average."""
    model = net()
    return model, wrap(adamw(model.parameters())), AveragedModel(model, **KINDS[kind]())


def averages_of(optimizer):
    return optfuse.summary(optimizer).averages


def script_of(kind, dtype=torch.float32, make=adamw, look=None, n_averages=None, build=long_net):
    """n_averages: how many of each model's parameters are averaged with their update; None: all."""

    def script(wrap):
        model = build(dtype)
        optimizer = wrap(make(model.parameters()))
        averaged = AveragedModel(model, **kind())
        for i in range(STEPS):
            optimizer.zero_grad()
            backward(model, i, dtype)
            optimizer.step()
            update(wrap, averaged, model)
            if look is not None and i > 1:
                yield "look", look(averaged)
        if wrap.fused and n_averages != "any":
            n = len([*model.parameters()]) if n_averages is None else n_averages
            assert averages_of(optimizer) == n * (STEPS - 1)
        yield "average", dict(averaged.state_dict())
        yield from everything(model, optimizer)

    return script
