# SPDX-License-Identifier: BSD-3-Clause
"""torch.optim.swa_utils.AveragedModel of models whose optimizer is fused: the averages of PyTorch,
made with the updates of the weights in forward mode."""

import pytest
import torch
from averaged import KINDS, averaged_net, averages_of, update
from clip_scripts import DTYPES, backward
from common import (
    adamw,
    everything,
    same,
)
from torch import nn
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel


def wide_net(dtype):
    return nn.Sequential(nn.Linear(33, 4001), nn.Linear(4001, 3)).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", (1, 2))
def test_threads(kind, dtype, threads):
    """PyTorch's operator shares large tensors out among threads."""

    def script(wrap):
        model = wide_net(dtype)
        optimizer = wrap(adamw(model.parameters()))
        averaged = AveragedModel(model, **KINDS[kind]())
        for i in range(3):
            optimizer.zero_grad()
            backward(model, i, dtype)
            optimizer.step()
            update(wrap, averaged, model)
        if wrap.fused:
            assert averages_of(optimizer) == 2 * len([*model.parameters()])
        yield "average", dict(averaged.state_dict())
        yield from everything(model, optimizer)

    n = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        same(script, prove=False)
    finally:
        torch.set_num_threads(n)


def test_with_clipping_scaling_and_a_scheduler():
    def script(wrap):
        model, optimizer, averaged = averaged_net(wrap)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        for i in range(6):
            optimizer.zero_grad()
            scaler.scale(
                nn.functional.mse_loss(model(torch.ones(4, 6) * i), torch.ones(4, 3))
            ).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            update(wrap, averaged, model)
            yield "average", [p.detach().clone() for p in averaged.parameters()] if i % 2 else []
        yield from everything(model, optimizer)

    same(script)


def test_a_decay_of_zero_is_pytorchs():
    """Its lerp at 1 has another zero in its tails, also in those between two threads."""

    def script(wrap):
        model = nn.ParameterList([nn.Parameter(torch.full((40011,), -0.0))])
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        averaged = AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.0))
        for _ in range(3):
            model[0].grad = torch.zeros(40011)
            optimizer.step()
            update(wrap, averaged, model)
        yield "average", averaged.module[0].view(torch.int32)

    n = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        same(script, prove=False)
    finally:
        torch.set_num_threads(n)
