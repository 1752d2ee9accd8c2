# SPDX-License-Identifier: BSD-3-Clause
"""Section small: nets that train in microseconds, as reinforcement learning, tabular data and
scientific fits have them, on one thread and on two, with what their loops do around step():
clipping by the norm, and an average of the weights. PyTorch's rows run PyTorch's own functions,
also where optfuse has replaced these for fused optimizers; beside them whole steps that are
compiled, by PyTorch and by JAX (peers.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import compare
import peers
import torch
from cells import OPTIMIZERS
from figures import FUSED, NONE, OURS, columns, title
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from variants import few_variants

import optfuse
from optfuse._averages import stock_update_parameters
from optfuse._clipping.torch_functions import stock_clip_grads_with_norm_, stock_get_total_norm
from optfuse._options import is_fused
from optfuse_tools.ab.variants import BuildFn, Iteration, NoOptimizer, Wrap

Make = Callable[[Iterator[Tensor]], torch.optim.Optimizer]
ROUNDS = 60
ALONE = 200  # times the arithmetic is measured by itself
THREADS = (1, 2)
FLOOR = "floor"
SHOWN = (FUSED, "forward fusion", "backward fusion", peers.COMPILED, peers.JAX)
MAX_NORM, DECAY = 0.5, 0.999


def tower(widths: list[int], activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n, m in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(n, m), activation()]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class Net:
    name: str
    widths: list[int]
    batch: int
    iterations: int  # a round
    dtype: torch.dtype = torch.float32
    of_derivatives: bool = False  # the loss is of u_t - u_xx, as in a fit to an equation

    def in_jax(self, run: Callable[[Any], Any], x: Any, y: Any) -> Any:
        """The loss below, of arrays of JAX."""
        if not self.of_derivatives:
            return ((run(x) - y) ** 2).mean()
        grad = peers.started().grad
        first = grad(lambda x: run(x).sum())
        second = grad(lambda x: first(x)[:, 0].sum())(x)
        return ((first(x)[:, 1] - second[:, 0]) ** 2).mean() + ((run(x) - y) ** 2).mean()

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if not self.of_derivatives:
            return (model(x) - y).square().mean()
        x = x.clone().requires_grad_()
        u = model(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        return (first[:, 1] - second[:, 0]).square().mean() + (u - y).square().mean()


NETS = (
    Net("PPO's net", [4, 64, 64, 2], 64, 100),
    Net("SAC's critic", [23, 256, 256, 1], 256, 20),
    Net("20 x 128", [128] * 21, 64, 20),
    Net("a fit to an equation, float64", [2, 50, 50, 50, 50, 1], 256, 10, torch.float64, True),
    Net("100 x 64", [64] * 101, 64, 6),
)
SETTINGS = {"step": (False, False), "clip": (True, False), "clip and EMA": (True, True)}


@dataclass(frozen=True)
class SmallCell:
    net: Net
    setting: str
    threads: int
    device: str = "cpu"

    @property
    def iterations(self) -> int:
        return self.net.iterations

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{self.net.name}, {self.setting}, {threads}"


def _clip(parameters: list[Tensor], by_stock: bool) -> None:
    if not by_stock:
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        return
    norm = stock_get_total_norm([p.grad for p in parameters if p.grad is not None])
    stock_clip_grads_with_norm_(parameters, MAX_NORM, norm)


def _average(averaged: AveragedModel, model: nn.Module, by_stock: bool) -> None:
    if by_stock:
        stock_update_parameters(averaged, model)
    else:
        averaged.update_parameters(model)


def numbers(net: Net) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((net.batch, net.widths[0]), (net.batch, net.widths[-1]))
    x, y = (torch.randn(shape, generator=generator, dtype=net.dtype) for shape in shapes)
    return x, y


def training(cell: SmallCell, make: Make) -> BuildFn:
    net, (clips, averages) = cell.net, SETTINGS[cell.setting]
    x, y = numbers(net)

    def build(wrap: Wrap) -> Iteration:
        model = tower(net.widths).to(net.dtype)
        opt = wrap(make(model.parameters()))
        if isinstance(opt, peers.Jitted):
            return in_jax(cell, opt, model, x, y)
        opt, whole = peers.stock_of(opt)
        by_stock, trains = not is_fused(opt), not isinstance(opt, NoOptimizer)
        parameters = list(model.parameters())
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

        def iterate() -> Tensor:
            opt.zero_grad()
            loss = net.loss(model, x, y)
            loss.backward()
            if clips and trains:
                _clip(parameters, by_stock)
            opt.step()
            if averages and trains:
                _average(averaged, model, by_stock)
            return loss.detach()

        return whole(iterate)

    return build


def in_jax(cell: SmallCell, opt: peers.Jitted, model: nn.Module, x: Tensor, y: Tensor) -> Iteration:
    net, (clips, averages) = cell.net, SETTINGS[cell.setting]
    inputs, wanted = peers.array(x), peers.array(y)
    first = net.loss(model, x, y).item()
    limits = MAX_NORM if clips else None, DECAY if averages else None
    return peers.jitted(opt, model, lambda run: net.in_jax(run, inputs, wanted), first, *limits)


def arithmetic_us(cell: SmallCell, make: Make) -> float:
    """Microseconds of the norm, the update and the average by themselves, the floor of what the
    cell's loop can cost above one without an optimizer: the median of clipping and of the flush()
    that makes what step() and the average have left, without forward and backward."""
    net, (clips, averages) = cell.net, SETTINGS[cell.setting]
    model = tower(net.widths).to(net.dtype)
    opt = optfuse.fuse(make(model.parameters()))
    parameters = list(model.parameters())
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    net.loss(model, *numbers(net)).backward()
    found = []
    for _ in range(ALONE):
        began = perf_counter()
        if clips:
            _clip(parameters, by_stock=False)
        clipped = perf_counter()
        opt.step()
        if averages:
            _average(averaged, model, by_stock=False)
        left = perf_counter()
        optfuse.flush()
        found.append(perf_counter() - left + clipped - began)
    return median(found) * 1e6


def section(chosen: Any) -> dict[str, Any]:
    before = torch.get_num_threads()
    nets = NETS[:1] if chosen.smoke or chosen.quick else NETS
    threads = (chosen.threads,) if chosen.threads else THREADS
    cells = [SmallCell(net, s, n) for n in threads for net in nets for s in SETTINGS]
    found: list[dict[str, Any]] = []
    make = OPTIMIZERS[chosen.optimizer]
    try:
        for cell in compare.in_time(cells, chosen):
            torch.set_num_threads(cell.threads)
            build, rounds = training(cell, make), chosen.rounds or ROUNDS
            wraps = {**few_variants(), **peers.peers(chosen.compiled)}
            measured = compare.compare(chosen, cell, build, wraps, rounds, None)
            floor = arithmetic_us(cell, make)
            found += [summary(one, floor) for one in measured]
    finally:
        torch.set_num_threads(before)
    title("x no optimizer, medians; the floor is the arithmetic alone, beside no optimizer")
    print(columns([("", *SHOWN, FLOOR), *map(row, found)]))
    return {"cells": found}


def summary(one: compare.Measured, floor_us: float) -> dict[str, Any]:
    """Small: microseconds of each variant, and how many times those of no optimizer."""
    us = {line.name: line.ms.median * 1000 for line in one.lines}
    ratios = {name: value / us[NONE] for name, value in us.items() if name != NONE}
    return {
        "cell": str(one),
        "rounds": one.rounds,
        "us": us,
        "floor_us": floor_us,
        "x no optimizer": {**ratios, FLOOR: 1 + floor_us / us[NONE]},
        "x fused": {line.name: line.against_fused for line in one.lines if line.name in OURS},
        "equal_bits": all(line.equal_bits is not False for line in one.lines if line.name in OURS),
    }


def row(cell: dict[str, Any]) -> tuple[str, ...]:
    ratios = cell["x no optimizer"]
    names = (*SHOWN, FLOOR)
    return (cell["cell"], *(f"{ratios[name]:.2f}" if name in ratios else "-" for name in names))
