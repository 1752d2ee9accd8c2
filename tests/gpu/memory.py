# SPDX-License-Identifier: BSD-3-Clause
"""Memory and waiting: backward mode frees the gradients, forward mode needs no
more than stock, and no step waits for the device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from harness import On, common, scenario
from torch import nn

WIDTH, LAYERS, WARMUP, STEPS = 1024, 24, 2, 3
GRADIENTS = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
#: Peak bytes above what was there before, by run; for the report.
PEAKS: dict[str, int] = {}


def deep(on: On) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).to(on.device)


def peak(on: On, wrap: Callable[[Any], Any], clear: bool) -> int:
    """Peak bytes of a few iterations; clear: zero_grad() right after step()."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = deep(on)
    optimizer = wrap(common.adamw(model.parameters()))
    x = torch.ones(8, WIDTH, device=on.device)
    for i in range(WARMUP + STEPS):
        if i == WARMUP:
            torch.cuda.reset_peak_memory_stats()
        if not clear:
            optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if clear:
            optimizer.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measured(on: On, clear: bool) -> tuple[int, int]:
    peak(on, common.Stock(), clear)  # what is allocated once is allocated before
    when = "zero_grad() after step()" if clear else "zero_grad() before forward"
    stock = peak(on, common.Stock(), clear)
    ours = peak(on, common.Fused(on.mode), clear)
    PEAKS[f"stock fused=True, {when}"] = stock
    PEAKS[f"{on.mode}, {when}"] = ours
    return stock, ours


@scenario(devices=("cuda",), modes=("backward",))
def backward_mode_needs_less_memory_by_about_the_gradients(on: On) -> None:
    stock, ours = measured(on, clear=False)
    assert stock - ours > 0.7 * GRADIENTS, (
        f"peak {ours / 1e6:.1f} MB, stock's {stock / 1e6:.1f} MB; the gradients are "
        f"{GRADIENTS / 1e6:.1f} MB"
    )


@scenario(devices=("cuda",), modes=("forward",))
def forward_mode_needs_no_more_memory_than_stock(on: On) -> None:
    stock, ours = measured(on, clear=False)
    assert ours <= stock + (1 << 20), f"peak {ours / 1e6:.1f} MB, stock's {stock / 1e6:.1f} MB"


@scenario(devices=("cuda",), modes=("forward",))
def pending_updates_hold_gradients_until_they_are_used(on: On) -> None:
    """Cleared right after step(), stock's gradients are gone; ours live until
    the next forward pass. Never more than they are."""
    stock, ours = measured(on, clear=True)
    assert ours <= stock + GRADIENTS + (1 << 20), (
        f"peak {ours / 1e6:.1f} MB, stock's {stock / 1e6:.1f} MB"
    )


@contextmanager
def no_waiting(on: On) -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    if not on.is_cuda:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@scenario()
def no_step_waits_for_the_device(on: On) -> None:
    for make in (common.adamw, common.sgd):
        model = on.net()
        optimizer = common.Fused(on.mode)(make(model.parameters()))
        inputs = [on.batch(i) for i in range(WARMUP + STEPS)]
        for x, y in inputs[:WARMUP]:
            iterate(model, optimizer, x, y)
        with no_waiting(on):
            for x, y in inputs[WARMUP:]:
                iterate(model, optimizer, x, y)


def iterate(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


@scenario(devices=("cuda",), modes=("forward",))
def waiting_would_be_noticed(on: On) -> None:
    """The control of the scenario above."""
    try:
        with no_waiting(on):
            torch.ones(3, device=on.device).sum().item()
    except RuntimeError:
        return
    raise AssertionError("item() waited for the device and nothing was raised")


@scenario(devices=("cuda",), modes=("forward",))
def no_step_with_scalars_on_the_device_waits(on: On) -> None:
    """lr in a tensor on the device, and state that is capturable."""
    model = on.net()
    lr = torch.tensor(1e-2, device=on.device)
    stock = common.adamw(model.parameters(), lr=lr, capturable=True)
    optimizer = common.Fused(on.mode)(stock)
    inputs = [on.batch(i) for i in range(WARMUP + STEPS)]
    for x, y in inputs[:WARMUP]:
        iterate(model, optimizer, x, y)
    with no_waiting(on):
        for x, y in inputs[WARMUP:]:
            lr.mul_(0.9)
            iterate(model, optimizer, x, y)
