# SPDX-License-Identifier: BSD-3-Clause
"""A script that is in order with the stock optimizer must be in order with ours, and give the same
bits.

A script, as in common.py, is a generator function that takes `wrap` and yields
(name, value) pairs. A value is copied on the stream that is current where it is
yielded; so a script yields inside `with stream:`."""

from __future__ import annotations

import functools
import gc
import inspect

import gpu
import pytest
import torch
from common import Fused, Stock, adamw, assert_same, batch, snapshot
from gpu import NAME, settle
from scripts import trained
from torch import nn

# Optimizers of a script, kept so that it does not free them with work under way.
kept = []


def keep(wrap):
    def wrap_and_keep(optimizer, **options):
        kept.append(wrap(optimizer, **options))
        return kept[-1]

    for name in ("fused", "pending", "optimizers"):
        setattr(wrap_and_keep, name, getattr(wrap, name, None))
    return wrap_and_keep


def play(script, wrap):
    """The values that the script yields, on the CPU, and the races it causes."""
    settle()
    torch.manual_seed(0)
    seen = []
    for item in script(keep(wrap)):
        seen.append((item[0], snapshot(item[1])))
        del item
    gc.collect()  # what the script leaves behind is freed here, and watched
    found = gpu.races()
    settle()
    kept.clear()
    return [(name, to_host(value)) for name, value in seen], found


def to_host(value):
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: to_host(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_host(item) for item in value]
    return value


def legal(script, mode="forward", prove=True, **options):
    """Plays it with stock, which must cause no race, and with ours, which must
    cause none either and yield the same bits."""
    stock, found = play(script, Stock())
    assert not found, "the script is wrong, stock races:\n" + "\n".join(found)
    assert stock, "the script yielded nothing"
    wrap = Fused(mode, **options)
    ours, found = play(script, wrap)
    assert not found, "only ours races:\n" + "\n".join(found)
    try:
        compare(ours, stock)
    except AssertionError:
        if gpu.IS_REAL:
            must_repeat(script, stock)
        raise
    if prove:
        wrap.prove()


def in_order(*modes, prove=True, **options):
    """Makes a test of a script: it is legal() in these modes. Other arguments are the test's."""

    def made(script):
        given = list(inspect.signature(script).parameters.values())[1:]

        def test(mode=modes[0], **others):
            legal(functools.partial(script, **others), mode, prove, **options)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        several = [inspect.Parameter("mode", kind)] if len(modes) > 1 else []
        test.__signature__ = inspect.Signature([*given, *several])
        test.__name__, test.__doc__, test.script = script.__name__, script.__doc__, script
        return pytest.mark.parametrize("mode", modes)(test) if several else test

    return made


def compare(ours, stock):
    for i, (a, b) in enumerate(zip(ours, stock, strict=True)):
        assert_same(f"yield {i}, {b[0]}", a[1], b[1])


def must_repeat(script, stock):
    try:
        compare(play(script, Stock())[0], stock)
    except AssertionError as error:
        pytest.skip(f"not judged, stock does not repeat its own bits here: {error}")


def races_without(guard, script, monkeypatch, mode="forward", **options):
    """The negative control: with the guard off, the script must race."""
    gpu.only_played()
    monkeypatch.setenv("OPTFUSE_TEST_GUARDS_OFF", guard)
    _, found = play(script, Fused(mode, **options))
    assert found, f"no race is seen without {guard!r}: the script proves nothing"


# Small things to train


def training(make=adamw, model=None, **how):
    """A script that trains, and looks at all in the end; see tests/python/scripts.py."""
    return trained(make, model or net, **{"loss": loss_of, "iteration": train, **how})


def net(device=NAME):
    layers = (nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 400), nn.Tanh(), nn.Linear(400, 3))
    return nn.Sequential(*layers).to(device)


def loss_of(model, i):
    gpu.keep_busy()
    place = next(model.parameters()).device
    x, y = (part.to(place) for part in batch(i))
    return (model(x) - y).square().mean()


def backward(model, optimizer, i):
    optimizer.zero_grad()
    loss_of(model, i).backward()


def train(model, optimizer, i):
    backward(model, optimizer, i)
    optimizer.step()
