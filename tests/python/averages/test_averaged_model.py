# SPDX-License-Identifier: BSD-3-Clause
"""torch.optim.swa_utils.AveragedModel of models whose optimizer is fused: the averages of PyTorch,
made with the updates of the weights in forward mode."""

import functools

import pytest
import torch
from averaged import KINDS, averaged_net, averages_of, script_of, update
from clip_scripts import DTYPES, backward
from common import (
    adamw,
    everything,
    net,
    same,
    sgd,
    train,
)
from torch import nn
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel

#: Averages that are left to PyTorch's own function.
OTHERS = {
    "a function": lambda: {"avg_fn": lambda average, weight, _: 0.8 * average + 0.2 * weight},
    "EMA in a wrapper": lambda: {"multi_avg_fn": halved(swa_utils.get_ema_multi_avg_fn(0.9))},
    "a tensor for decay": lambda: {"multi_avg_fn": decay_of_tensor()},
}


def halved(function):
    @functools.wraps(function)
    def of_half(averages, weights, n):
        function(averages, [weight * 0.5 for weight in weights], n)

    return of_half


def decay_of_tensor():
    return swa_utils.get_ema_multi_avg_fn(torch.tensor(0.9))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_trainings(kind, dtype):
    same(script_of(kind, dtype))


@pytest.mark.parametrize("kind", OTHERS.values(), ids=OTHERS)
def test_other_averages_are_made_by_pytorch(kind):
    same(script_of(kind, n_averages=0), prove=False)


@pytest.mark.parametrize("kind", [*KINDS.values(), *OTHERS.values()], ids=[*KINDS, *OTHERS])
def test_backward_mode_has_nothing_pending(kind):
    same(script_of(kind, n_averages=0), "backward")


def wide_net(dtype):
    return nn.Sequential(nn.Linear(33, 4001), nn.Linear(4001, 3)).to(dtype)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("threads", (1, 2))
def test_threads(kind, threads):
    """PyTorch's operator shares large tensors out among threads."""
    n = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        same(script_of(kind, build=wide_net), prove=False)
    finally:
        torch.set_num_threads(n)


def test_twice_in_a_step_and_two_averages_of_a_model():
    def script(wrap):
        model = net()
        optimizer = wrap(sgd(model.parameters()))
        first, second = (AveragedModel(model, **KINDS[k]()) for k in ("EMA", "SWA"))
        for i in range(3):
            train(model, optimizer, i)
            update(wrap, first, model)
            update(wrap, second, model)
            if i == 1:
                update(wrap, first, model)
        yield "first", dict(first.state_dict())
        yield "second", dict(second.state_dict())

    same(script)


def test_an_average_of_the_average_and_a_model_trained_from_it():
    def script(wrap):
        model, optimizer, averaged = averaged_net(wrap)
        slower = AveragedModel(averaged.module, **KINDS["EMA"]())
        for i in range(4):
            train(model, optimizer, i)
            update(wrap, averaged, model)
            update(wrap, slower, averaged.module)
            if i == 2:
                with torch.no_grad():
                    for p, q in zip(model.parameters(), averaged.parameters(), strict=True):
                        p.copy_(q)
        yield "slower", dict(slower.state_dict())
        yield from everything(model, optimizer)

    same(script)


MAKERS = {
    "SGD": sgd,
    "RAdam": torch.optim.RAdam,
    "NAdam": torch.optim.NAdam,
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_optimizers(make):
    same(script_of(KINDS["EMA"], make=make, n_averages="any"))


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


@pytest.mark.parametrize("use_buffers", (True, False))
@pytest.mark.parametrize("norm", (nn.BatchNorm1d, nn.LayerNorm), ids=("buffers", "none"))
def test_buffers(norm, use_buffers):
    def script(wrap):
        model = nn.Sequential(nn.Linear(33, 8), norm(8), nn.Linear(8, 3))
        optimizer = wrap(adamw(model.parameters()))
        averaged = AveragedModel(model, use_buffers=use_buffers, **KINDS["EMA"]())
        for i in range(3):
            optimizer.zero_grad()
            backward(model, i)
            optimizer.step()
            update(wrap, averaged, model)
        yield "average", dict(averaged.state_dict())

    same(script, prove=False)


def test_frozen_and_tied_weights_and_some_that_are_not_pending():
    def script(wrap):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        model[2].weight.requires_grad_(False)
        optimizer = wrap(adamw([p for p in model.parameters() if p.requires_grad]))
        averaged = AveragedModel(model, **KINDS["EMA"]())
        for i in range(3):
            train(model, optimizer, i)
            model[0].bias.sum().item()
            update(wrap, averaged, model)
        yield "average", dict(averaged.state_dict())

    same(script)


@pytest.mark.parametrize("without", (1, 2))
def test_layers_without_a_bias(without):
    """Their parameter of that name is None."""

    def script(wrap):
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6, bias=i >= without) for i in range(3)]
        model = nn.Sequential(*layers, nn.Linear(6, 3))
        optimizer = wrap(adamw(model.parameters()))
        averaged = AveragedModel(model, **KINDS["EMA"]())
        for i in range(3):
            train(model, optimizer, i)
            update(wrap, averaged, model)
        if wrap.fused:
            assert averages_of(optimizer) == 2 * len([*model.parameters()])
        yield "average", dict(averaged.state_dict())

    same(script, "forward", prove=False)


def test_another_dtype_is_pytorchs():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        averaged = AveragedModel(model, **KINDS["EMA one by one"]()).double()
        for i in range(3):
            train(model, optimizer, i)
            update(wrap, averaged, model)
        yield "average", dict(averaged.state_dict())

    same(script, prove=False)


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
