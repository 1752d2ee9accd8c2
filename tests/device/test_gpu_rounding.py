# SPDX-License-Identifier: BSD-3-Clause
"""Stochastic rounding on a GPU: the kernels of optfuse.optim.AdamW and of Lion have the bits of the
class's own step() there, which are those on the CPU."""

import itertools

import gpu
import pytest
import torch
from common import assert_same
from gpu import NAME
from legal import to_host
from torch import nn
from tried import OWN, isa

import optfuse
from optfuse._trials import stock_trial
from optfuse.optim import CAME, ROUNDING, Adafactor, AdamW

FINAL = optfuse.Backward(final=True)
MODES = {"forward": "forward", "backward": "backward", "final": FINAL}
NARROW = (torch.bfloat16, torch.float16)
SIZES = ((3,), (7, 5), (65, 33), (), (129, 70))
ROUND = {"stochastic_rounding": True}
ALL = {**ROUND, "stochastic_state": True, "seed": 2**53 - 1}
OPTIONS = (ROUND, ALL, {}, {**ROUND, "maximize": True, "weight_decay": 0.1})
CASES = list(itertools.product(ROUNDING, OPTIONS))
each_mode = pytest.mark.parametrize("mode", MODES)
pytestmark = pytest.mark.usefixtures("small_trials")


def made(cls, dtype=torch.bfloat16, devices=(NAME,), **options):
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(size, generator=generator) for size in SIZES]
    places = [devices[i % len(devices)] for i in range(len(SIZES))]
    params = [nn.Parameter(x.to(at, dtype)) for x, at in zip(drawn, places, strict=True)]
    return cls(params, **{"lr": 0.01, **options})


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def train(optimizer, mode="forward", n=5, begin=1):
    """By gradients that are those of no weight: hooks would give the same."""
    params = params_of(optimizer)
    for step in range(begin, begin + n):
        generator = torch.Generator().manual_seed(step)
        drawn = [torch.randn(p.shape, generator=generator).to(p.device, p.dtype) for p in params]
        optimizer.zero_grad()
        sum((p * g).sum().cpu() for p, g in zip(params, drawn, strict=True)).backward()
        if mode != "final":
            optimizer.step()
    return optimizer


def results(optimizer):
    return to_host([(p.detach(), dict(optimizer.state[p])) for p in params_of(optimizer)])


@each_mode
@pytest.mark.parametrize("dtype", (*NARROW, torch.float32), ids=str)
@pytest.mark.parametrize("cls, options", CASES, ids=str)
def test_kernels_have_the_bits_of_step_and_of_the_cpu(cls, options, dtype, mode):
    fused = train(optfuse.fuse(made(cls, dtype, **options), MODES[mode]), mode)
    assert isa(fused) == {str(dtype)[6:]: "cuda"}, str(optfuse.explain(fused))
    for device in (NAME, "cpu"):
        stock = train(made(cls, dtype, (device,), **options))
        assert_same(device, results(fused), results(stock))


@each_mode
def test_with_half_of_them_on_the_cpu(mode):
    devices = ("cpu", NAME)
    fused = train(optfuse.fuse(made(AdamW, devices=devices, **ALL), MODES[mode]), mode)
    for places in (devices, (NAME,)):
        stock = train(made(AdamW, devices=places, **ALL))
        assert_same("results", results(fused), results(stock))


FACTORED = ((Adafactor, {"relative_step": False}), (CAME, {}))


@each_mode
@pytest.mark.parametrize("devices", ((NAME,), ("cpu", NAME)), ids=str)
@pytest.mark.parametrize("cls, options", FACTORED, ids=str)
def test_classes_without_kernels_there(cls, options, devices, mode):
    how = {"devices": devices, **ROUND, **options}
    fused = train(optfuse.fuse(made(cls, **how), MODES[mode]), mode)
    assert_same("results", results(fused), results(train(made(cls, **how))))


def test_state_may_become_wide_and_a_seed_another_one():
    """Updates of one launch have one seed and one dtype of state."""
    fused, stock = optfuse.fuse(made(AdamW, **ALL)), made(AdamW, **ALL)
    for optimizer in (fused, stock):
        train(optimizer, n=2)
        for p in params_of(optimizer)[::2]:
            state = optimizer.state[p]
            state.update({name: state[name].float() for name in AdamW.STATE})
        optimizer.param_groups[0].update(seed=3)
        train(optimizer, n=2, begin=3)
    assert not gpu.IS_REAL or isa(fused) != OWN
    assert_same("results", results(fused), results(stock))


def test_integers_for_updates_by_operators_are_made_there():
    eager = made(CAME, **ROUND)
    for p in params_of(eager):
        p.grad = torch.ones_like(p)
    assert gpu.kernels(eager.step) == len(SIZES) * ["of_cuda_draw_integers"]


def test_one_trial_is_for_all_seeds(monkeypatch):
    optfuse.fuse(made(AdamW, seed=1))
    monkeypatch.setattr(stock_trial, "_compare", lambda *_: pytest.fail("tried again"))
    assert isa(optfuse.fuse(made(AdamW, seed=2))) == {"bfloat16": "cuda"}


def test_steps_in_one_launch():
    fused = optfuse.fuse(made(AdamW, **ALL))
    train(fused, n=3)
    optfuse.flush(fused)
    assert optfuse.summary(fused).launches == 3
