# SPDX-License-Identifier: BSD-3-Clause
"""Section kernels: the update alone, on equal tensors with gradients that stay. Every optimizer
against each of stock's implementations and, where there is one, the floor of its bytes; ours is
step() and flush() in forward mode. On a GPU the chosen optimizer only."""

from __future__ import annotations

import gc
import inspect
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from bytes_alone import bytes_each, one_tensor, path
from figures import Interval, columns, median_interval, of_medians, progress, title
from torch import nn
from torch.optim import Optimizer

import optfuse
from optfuse._rules import NATIVE, RULES

Run = Callable[[], object]
WARM_SECONDS = 0.3  # of a GPU: until its clocks are up
QUEUED_MS = 1.0  # of work before a GPU's start event, at least
AHEAD = 4  # and so many times what the host takes, which takes longer while the GPU is busy
OURS, FLOOR = "optfuse", "bytes alone"
FLAGS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False, "fused": False},
}
OPTIONS = {"SGD": {"momentum": 0.9}}
MOVES = {"AdamW": "adamw", "Adam": "adam", "SGD": "momentum"}  # as which the floor moves


class Timer:
    """Times one piece of work: on a GPU between events, else by the clock."""

    def __init__(self, device: str, cycles: int = 0) -> None:
        self.device = device
        self.cycles = cycles  # of a GPU's clock in which nothing else begins
        self.spans: list[tuple[Any, Any]] = []
        self.host: list[float] = []  # ms in which the host issued the work

    def moment(self) -> Any:
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def time(self, run: Run) -> None:
        if self.device != "cpu":  # while this is at work the host gets ahead
            torch.cuda._sleep(self.cycles)
        start, began = self.moment(), time.perf_counter()
        run()
        self.host.append((time.perf_counter() - began) * 1e3)
        self.spans.append((start, self.moment()))

    def ms(self) -> list[float]:
        if self.device == "cpu":
            return [(end - start) * 1e3 for start, end in self.spans]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in self.spans]


def warm_up(run: Run, device: str) -> int:
    """Runs once. On a GPU it returns how many cycles of its clock to queue before a run, so that
    the host has launched the run when the GPU comes to it."""
    if device == "cpu":
        run()
        return 0
    until, host_ms = time.perf_counter() + WARM_SECONDS, 0.0
    torch.cuda.synchronize()
    while time.perf_counter() < until:
        began = time.perf_counter()
        run()
        host_ms = (time.perf_counter() - began) * 1e3
        torch.cuda.synchronize()
    cycles = 10_000_000
    timer = Timer("cuda")
    timer.time(lambda: torch.cuda._sleep(cycles))
    return round(cycles / timer.ms()[0] * max(QUEUED_MS, AHEAD * host_ms))


def in_turn(cases: Mapping[str, Run], rounds: int, device: str) -> dict[str, Timer]:
    """In a round each runs once timed, in shuffled order, after once untimed."""
    timers = {name: Timer(device, warm_up(run, device)) for name, run in cases.items()}
    order = list(cases)
    shuffle = random.Random(0).shuffle
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            cases[name]()
            timers[name].time(cases[name])
    gc.enable()
    return timers


@dataclass(frozen=True)
class Shape:
    """Matrices, as Muon wants them."""

    tensors: int
    rows: int
    columns: int
    rounds: int
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        each = f"{self.tensors} x {self.rows * self.columns:,}"
        return each if self.dtype == torch.float32 else f"{each} bfloat16"

    def elements(self) -> int:
        return self.tensors * self.rows * self.columns


LARGE, LARGE_BFLOAT16 = Shape(50, 1000, 1000, 12), Shape(50, 1000, 1000, 12, torch.bfloat16)
SHAPES = (Shape(16, 256, 256, 100), LARGE, Shape(300, 20, 50, 60))
QUICK, SMOKE = Shape(300, 20, 50, 6), Shape(20, 10, 10, 3)
GPU_SIZES = ((1, 1024, 1024), (1, 4096, 4096), (1, 8192, 8192), (160, 220, 100))
GPU_SIZES += ((256, 256, 256), (1000, 20, 50))


@dataclass(frozen=True)
class Raced:
    optimizer: str
    shape: str
    ms: dict[str, Interval]  # a step, by implementation
    host_ms: dict[str, Interval]  # on a GPU: until the host has issued it
    speed: dict[str, Interval]  # stock's time, and the floor's, by ours
    best: str  # of stock's
    equal_bits: bool | None  # ours and the reference's parameters after the same steps
    gb_per_s: float | None  # ours, of the bytes that the update must move

    def cells(self) -> list[str]:
        def of(ms: dict[str, Interval], name: str) -> str:
            return f"{ms[name].median:.3f}" if name in ms else "-"

        rate = "-" if self.gb_per_s is None else f"{self.gb_per_s:.0f}"
        verdict = "" if self.speed[self.best].high >= 1 else "SLOWER"
        best = [self.best, str(self.speed[self.best]), rate, of(self.host_ms, OURS), verdict]
        return [self.optimizer, *(of(self.ms, name) for name in NAMES), *best]


NAMES = (*FLAGS, FLOOR, OURS)
HEAD = ["", *NAMES, "best of stock", "x best", "GB/s", "host", ""]


def made(cls: type[Optimizer], shape: Shape, device: str = "cpu", **flags: bool) -> Optimizer:
    """With parameters and gradients of its own, the same in each."""
    generator = torch.Generator().manual_seed(0)
    params = []
    for _ in range(shape.tensors):
        param, grad = torch.randn(2, shape.rows, shape.columns, generator=generator)
        params.append(nn.Parameter(param.to(device, shape.dtype, copy=True)))
        params[-1].grad = grad.to(device, shape.dtype, copy=True)
    options: dict[str, Any] = {"lr": 1e-3, **OPTIONS.get(cls.__name__, {}), **flags}
    return cls(params, **options)


def implementations(cls: type[Optimizer], shape: Shape, device: str) -> dict[str, Optimizer]:
    """Stock's by name, each with its flags; and ours."""
    accepted = inspect.signature(cls).parameters
    found = {}
    for name, flags in FLAGS.items():
        known = {flag: value for flag, value in flags.items() if flag in accepted}
        if any(known.values()) or name == "for-loop":
            found[name] = made(cls, shape, device, **known)
    found[OURS] = optfuse.fuse(made(cls, shape, device))
    return found


def stepper(optimizer: Optimizer, name: str) -> Run:
    if name != OURS:
        return optimizer.step
    return lambda: (optimizer.step(), optfuse.flush(optimizer))


def equal(one: Optimizer, other: Optimizer) -> bool:
    pairs = zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True)
    return all(torch.equal(p.view(torch.uint8), q.view(torch.uint8)) for p, q in pairs)


def race(cls: type[Optimizer], shape: Shape, device: str = "cpu") -> Raced:
    optimizers = implementations(cls, shape, device)
    steps = {name: stepper(one, name) for name, one in optimizers.items()}
    moves, on_gpu = MOVES.get(cls.__name__), device != "cpu"
    if moves and shape.elements() == LARGE.elements() and not on_gpu and path().exists():
        steps[FLOOR], *_ = one_tensor(moves, shape.elements(), shape.dtype)
    timers = in_turn(steps, shape.rounds, device)
    series = {name: timer.ms() for name, timer in timers.items()}
    ms = {name: median_interval(times) for name, times in series.items()}
    moved = bytes_each(moves, shape.dtype.itemsize) * shape.elements() if moves else None
    reference = "fused" if cls in RULES and RULES[cls].reference == "fused=True" else "for-loop"
    return Raced(
        cls.__name__,
        str(shape),
        ms,
        {name: median_interval(timer.host) for name, timer in timers.items()} if on_gpu else {},
        {n: of_medians(lambda s, o: s / o, t, series[OURS]) for n, t in series.items()},
        min((n for n in ms if n not in (OURS, FLOOR)), key=lambda name: ms[name].median),
        # a GPU is warmed up for a time, in which each takes as many steps as it can
        None if on_gpu else equal(optimizers[OURS], optimizers[reference]),
        moved / ms[OURS].median / 1e6 if moved else None,
    )


def races(chosen: Any) -> dict[Shape, list[type[Optimizer]]]:
    every = list(dict.fromkeys((*RULES, *NATIVE)))
    if chosen.device == "cuda":
        every = [c for c in every if MOVES.get(c.__name__, "sgd") == chosen.optimizer]
        return (
            {Shape(*size, 40): every for size in GPU_SIZES} if not chosen.smoke else {SMOKE: every}
        )
    shapes = (SMOKE,) if chosen.smoke else (QUICK,) if chosen.quick else SHAPES
    found = dict.fromkeys(shapes, every)
    return found if LARGE not in found else {**found, LARGE_BFLOAT16: [torch.optim.AdamW]}


def section(chosen: Any) -> dict[str, Any]:
    found: list[Raced] = []
    title(f"The update alone, ms a step, {torch.get_num_threads()} threads")
    for shape, classes in races(chosen).items():
        rows = [HEAD]
        for cls in classes:
            if cls.__name__ == "Muon" and shape == LARGE:
                continue  # its products take minutes a step
            progress(f"kernels: {shape}, {cls.__name__}")
            found.append(race(cls, shape, chosen.device))
            rows.append(found[-1].cells())
            if found[-1].equal_bits is False:
                print(f"{cls.__name__}: bits DIFFER from the reference's")
        progress("")
        print(f"{shape} elements, {shape.rounds} rounds\n{columns(rows)}", flush=True)
    return {"raced": found}
