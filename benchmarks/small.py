# SPDX-License-Identifier: BSD-3-Clause
"""Section small: nets that train in microseconds, as reinforcement learning, tabular data and
scientific fits have them, on one thread and on two, with what their loops do around step():
clipping by the norm, and an average of the weights. PyTorch's rows run PyTorch's own functions,
also where optfuse has replaced these for fused optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import compare
import torch
from cells import OPTIMIZERS
from figures import FUSED, NONE, OURS, columns, title
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from variants import few_variants

from optfuse._ab.variants import BuildFn, Iteration, NoOptimizer, Wrap
from optfuse._averages.averaged_model import stock_update_parameters
from optfuse._clipping.torch_functions import stock_clip_grads_with_norm_, stock_get_total_norm
from optfuse._options import is_fused

ROUNDS = 60
THREADS = (1, 2)
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


def training(cell: SmallCell, make: Callable[[Iterator[Tensor]], torch.optim.Optimizer]) -> BuildFn:
    net, (clips, averages) = cell.net, SETTINGS[cell.setting]
    x, y = numbers(net)

    def build(wrap: Wrap) -> Iteration:
        model = tower(net.widths).to(net.dtype)
        opt = wrap(make(model.parameters()))
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
            return loss

        return iterate

    return build


def section(chosen: Any) -> dict[str, Any]:
    before = torch.get_num_threads()
    nets = NETS[:1] if chosen.smoke or chosen.quick else NETS
    cells = [SmallCell(net, s, n) for n in THREADS for net in nets for s in SETTINGS]
    found: list[compare.Measured] = []
    make = OPTIMIZERS[chosen.optimizer]
    try:
        for cell in compare.in_time(cells, chosen):
            torch.set_num_threads(cell.threads)
            build, rounds = training(cell, make), chosen.rounds or ROUNDS
            found += compare.compare(chosen, cell, build, few_variants(), rounds, None)
    finally:
        torch.set_num_threads(before)
    title("x no optimizer, medians: fused=True, forward fusion, backward fusion")
    print(columns([row(one) for one in found]))
    return {"cells": [{"rounds": one.rounds, **summary(one)} for one in found]}


def summary(one: compare.Measured) -> dict[str, Any]:
    """Small: microseconds of each variant, and how many times those of no optimizer."""
    us = {line.name: line.ms.median * 1000 for line in one.lines}
    return {
        "cell": str(one),
        "us": us,
        "x no optimizer": {name: value / us[NONE] for name, value in us.items() if name != NONE},
        "x fused": {line.name: line.against_fused for line in one.lines if line.name in OURS},
        "equal_bits": all(line.equal_bits is not False for line in one.lines if line.name in OURS),
    }


def row(one: compare.Measured) -> tuple[str, ...]:
    ratios = summary(one)["x no optimizer"]
    names = (FUSED, "forward fusion", "backward fusion")
    return (str(one), *(f"{ratios[name]:.2f}" if name in ratios else "-" for name in names))
