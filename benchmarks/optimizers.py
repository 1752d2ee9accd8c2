# SPDX-License-Identifier: BSD-3-Clause
"""The update alone with every optimizer that fuses, against each of stock's
implementations, on equal tensors with gradients that stay: ours is step() and
flush() in forward mode."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from console import columns, progress, title
from interleave import in_turn
from resample import of_medians
from torch import nn
from torch.optim import Optimizer

import optfuse
from optfuse._ab.result import Interval
from optfuse._own_step.register import INDEPENDENT
from optfuse._rules import RULES

OURS = "optfuse"
FLAGS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False, "fused": False},
}
OPTIONS = {"SGD": {"momentum": 0.9}}


@dataclass(frozen=True)
class Shape:
    """Matrices, as Muon wants them; rounds, and steps timed in each."""

    name: str
    tensors: int
    rows: int
    columns: int
    rounds: int
    repeats: int


SHAPES = (
    Shape("1 M", 16, 256, 256, 40, 4),
    Shape("50 M", 50, 1000, 1000, 12, 1),
    Shape("300 x 1,000", 300, 20, 50, 40, 2),
)
QUICK = Shape("300 x 1,000", 300, 20, 50, 6, 1)
SMOKE = Shape("20 x 100", 20, 10, 10, 3, 1)
#: Its products take minutes a step there.
TOO_LONG = {("Muon", "50 M")}


@dataclass(frozen=True)
class Raced:
    optimizer: str
    shape: str
    us: dict[str, Interval]  # a step, by implementation
    speed: dict[str, Interval]  # stock's time by ours
    best: str  # of stock's
    equal_bits: bool | None  # ours and the reference's parameters after the same steps

    def cells(self) -> list[str]:
        stock = [f"{self.us[name].median / 1e3:.3f}" if name in self.us else "-" for name in FLAGS]
        verdict = "" if self.speed[self.best].high >= 1 else "SLOWER"
        own = f"{self.us[OURS].median / 1e3:.3f}"
        return [self.optimizer, *stock, own, self.best, str(self.speed[self.best]), verdict]


HEAD = ["", *FLAGS, "optfuse", "best of stock", "x best", ""]


def made(cls: type[Optimizer], shape: Shape, **flags: bool) -> Optimizer:
    """With parameters and gradients of its own, the same in each."""
    generator = torch.Generator().manual_seed(0)
    params = []
    for _ in range(shape.tensors):
        param = nn.Parameter(torch.randn(shape.rows, shape.columns, generator=generator))
        param.grad = torch.randn(param.shape, generator=generator)
        params.append(param)
    options: dict[str, Any] = {"lr": 1e-3, **OPTIONS.get(cls.__name__, {}), **flags}
    return cls(params, **options)


def implementations(cls: type[Optimizer], shape: Shape) -> dict[str, Optimizer]:
    """Stock's by name, each with its flags; and ours."""
    accepted = inspect.signature(cls).parameters
    found = {}
    for name, flags in FLAGS.items():
        known = {flag: value for flag, value in flags.items() if flag in accepted}
        if any(known.values()) or name == "for-loop":
            found[name] = made(cls, shape, **known)
    found[OURS] = optfuse.fuse(made(cls, shape))
    return found


def stepper(optimizer: Optimizer, name: str) -> Callable[[], object]:
    if name != OURS:
        return optimizer.step

    def step() -> None:
        optimizer.step()
        optfuse.flush(optimizer)

    return step


def equal(one: Optimizer, other: Optimizer) -> bool:
    pairs = zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True)
    return all(torch.equal(p.view(torch.int32), q.view(torch.int32)) for p, q in pairs)


def race(cls: type[Optimizer], shape: Shape) -> Raced:
    optimizers = implementations(cls, shape)
    steps = {name: stepper(one, name) for name, one in optimizers.items()}
    gc.collect()
    us = in_turn(steps, shape.rounds, dict.fromkeys(steps, shape.repeats))
    medians = {name: of_medians(lambda t: t, times) for name, times in us.items()}
    stock = [name for name in us if name != OURS]
    fused = cls in RULES and RULES[cls].reference == "fused=True"
    return Raced(
        cls.__name__,
        shape.name,
        medians,
        {name: of_medians(lambda s, o: s / o, us[name], us[OURS]) for name in stock},
        min(stock, key=lambda name: medians[name].median),
        equal(optimizers[OURS], optimizers["fused" if fused else "for-loop"]),
    )


def section(chosen: Any) -> dict[str, Any]:
    found = []
    shapes = (SMOKE,) if chosen.smoke else (QUICK,) if chosen.quick else SHAPES
    title(f"The update alone by optimizer, ms a step, {torch.get_num_threads()} threads, float32")
    for shape in shapes:
        here = []
        for cls in dict.fromkeys((*RULES, *INDEPENDENT)):
            if (cls.__name__, shape.name) in TOO_LONG:
                print(f"{cls.__name__} left out: a step takes too long")
                continue
            progress(f"optimizers: {shape.name}, {cls.__name__}")
            here.append(race(cls, shape))
        progress("")
        each = shape.rows * shape.columns
        print(f"{shape.tensors} tensors of {each:,} elements, {shape.rounds} rounds")
        print(columns([HEAD, *(one.cells() for one in here)]), flush=True)
        for one in here:
            if not one.equal_bits:
                print(f"{one.optimizer}: bits DIFFER from the reference's")
        found += here
    return {"raced": [asdict(one) for one in found]}
