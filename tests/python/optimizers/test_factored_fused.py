# SPDX-License-Identifier: BSD-3-Clause
"""Adafactor and CAME of optfuse.optim have the bits of step() when they are fused, in each mode."""

import re

import pytest
import torch
from common import assert_same
from factored_cases import (
    NARROW,
    OPTIONS,
    ROUND,
    by_operator,
    each_case,
    each_class,
    gradient,
    made,
    results,
    train,
)
from torch import nn

import optfuse
from optfuse.optim import Adafactor

MODES = {"forward": "forward", "backward": "backward", "final": optfuse.Backward(final=True)}
SAID = {
    "forward": r"8 operators ran as 0 programs and 8 operators",
    "backward": r"its step\(\) ran 6 times at the first gradient of backward",
    "final": r"its step\(\) ran on 64 gradients",
}
each_mode = pytest.mark.parametrize("mode", MODES)


def network(dtype):
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 6, 3), nn.Flatten(), nn.Linear(96, 40), nn.Tanh(), nn.Linear(40, 33)
    return nn.Sequential(*layers, nn.LayerNorm(33)).to(dtype)


def iterate(model, optimizer, first=0, steps=8, scheduler=None):
    generator = torch.Generator().manual_seed(first)
    for _ in range(steps):
        inputs = torch.randn(5, 2, 6, 6, generator=generator).to(model[0].weight.dtype)
        optimizer.zero_grad()
        model(inputs).float().square().mul(torch.arange(33)).mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def trained(cls, options, dtype, mode=None):
    model = network(dtype)
    optimizer = cls(model.parameters(), **options)
    if mode is not None:
        optimizer = optfuse.fuse(optimizer, MODES[mode])
    iterate(model, optimizer)
    return optimizer


@each_mode
@pytest.mark.parametrize("dtype", (torch.float32, *NARROW))
@each_case
def test_fused_has_the_bits_of_step(cls, options, dtype, mode, monkeypatch):
    for how in ({}, ROUND):
        its = {**options, **how}
        fused = trained(cls, its, dtype, mode)
        said = str(optfuse.explain(fused))
        assert re.search(SAID[mode], said), said
        assert_same("results", results(fused), results(trained(cls, its, dtype)))
        with monkeypatch.context() as patch:
            by_operator(patch, False)
            assert_same("results", results(fused), results(trained(cls, its, dtype)))


@each_mode
@pytest.mark.parametrize("threads", (2, 3))
def test_fused_has_the_bits_of_step_on_several_threads(threads, mode):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        both = [trained(Adafactor, ROUND, torch.bfloat16, how) for how in (mode, None)]
    finally:
        torch.set_num_threads(before)
    assert_same("results", *map(results, both))


@each_mode
@each_class
def test_a_resumed_run_goes_on_bit_by_bit(cls, mode, tmp_path):
    options = {**OPTIONS[cls][0], **ROUND}
    whole, model, twin = (network(torch.bfloat16) for _ in range(3))
    straight = cls(whole.parameters(), **options)
    iterate(whole, straight, 0)
    iterate(whole, straight, 1)
    first = optfuse.fuse(cls(model.parameters(), **options), MODES[mode])
    iterate(model, first, 0)
    torch.save((model.state_dict(), first.state_dict()), tmp_path / "saved")
    weights, state = torch.load(tmp_path / "saved")
    twin.load_state_dict(weights)
    resumed = cls(twin.parameters(), **OPTIONS[cls][0])  # how it rounds comes with the state
    resumed.load_state_dict(state)
    iterate(twin, optfuse.fuse(resumed, MODES[mode]), 1)
    assert_same("results", results(resumed), results(straight))


@pytest.mark.parametrize("mode", (None, *MODES))
@each_class
def test_a_trainers_hooks_may_step_each_parameter(cls, mode):
    """By step_parameter(), which every mode has; the number of a parameter names its integers."""
    options = {**OPTIONS[cls][0], **ROUND}
    model, twin = network(torch.bfloat16), network(torch.bfloat16)
    groups = [{"params": list(layer.parameters())} for layer in model if list(layer.parameters())]
    optimizer, stock = cls(groups, **options), cls(twin.parameters(), **options)
    if mode not in (None, "final"):
        optfuse.fuse(optimizer, MODES[mode])
    for group in optimizer.param_groups if mode != "final" else ():
        for i, p in enumerate(group["params"]):

            def hook(p, group=group, i=i):
                optimizer.step_parameter(p, group, i)
                p.grad = None

            p.register_post_accumulate_grad_hook(hook)
    if mode == "final":
        optfuse.fuse(optimizer, MODES[mode])
    iterate(model, optimizer)
    iterate(twin, stock)
    assert_same("results", results(optimizer), results(stock))


@each_class
def test_a_group_of_before_load_state_dict_is_refused(cls):
    params, optimizer = made(cls, **OPTIONS[cls][0])
    stale = optimizer.param_groups[0]
    train(optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="none of param_groups now"):
        optimizer.step_parameter(params[0], stale)
    before = optimizer.state[params[0]]["step"]
    optimizer.step_parameter(params[0], optimizer.param_groups[0])
    assert optimizer.state[params[0]]["step"] == before + 1


@each_class
def test_a_compiled_step_is_the_classs_own(cls):
    (p,), optimizer = made(cls, sizes=((40, 50),))
    (q,), plain = made(cls, sizes=((40, 50),))
    step = torch.compile(optimizer.step, backend="eager")
    for t in (1, 2):
        p.grad, q.grad = gradient(p, 0, t), gradient(q, 0, t)
        step()
        plain.step()
    assert_same("results", results(optimizer), results(plain))
