# SPDX-License-Identifier: BSD-3-Clause
"""The update alone: step() of stock's fused=True and of optfuse, with all that
it leaves pending launched, over the same tensors, in turn."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import optfuse
from optfuse._ab.result import Interval, median_interval

STOCK, OURS = "fused=True", "forward fusion, flushed"
#: Tensors and elements of each.
SHAPES = ((1, 1 << 20), (1, 1 << 24), (1, 1 << 26), (160, 22_000), (256, 1 << 16), (1000, 1000))
SMOKE_SHAPES = ((1, 1 << 10), (20, 100))
BYTES = {"adamw": 28, "adam": 28, "momentum": 20, "sgd": 12}  # an element, float32
WARMUP = 5
WARM_SECONDS = 0.3  # of a GPU: until its clocks are up
QUEUED_MS = 1.0  # of work before a GPU's start event, at least


@dataclass(frozen=True)
class Update:
    """Milliseconds a step: the GPU's (or, on the CPU, all of it), the host's."""

    tensors: int
    elements: int
    who: str
    ms: Interval
    host_ms: Interval
    gb_per_s: float
    launches: float | None  # a step; of ours

    def __str__(self) -> str:
        text = f"{self.tensors:>5} x {self.elements:>11,}  {self.who:<24} {self.ms!s:<26}"
        text += f" host {self.host_ms!s:<26} {self.gb_per_s:8.1f} GB/s"
        return text if self.launches is None else f"{text}  {self.launches:g} launches"


class Timer:
    """Of one step: on a GPU between events, else by the clock."""

    def __init__(self, device: str, cycles: int = 0) -> None:
        self.device = device
        self.cycles = cycles  # of a GPU's clock in which nothing else begins
        self.spans: list[tuple[Any, Any]] = []
        self.host: list[float] = []

    def moment(self) -> Any:
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def time(self, run: Callable[[], None]) -> None:
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


def warm_up(run: Callable[[], None], device: str) -> int:
    """Of a GPU also: how many cycles of its clock to queue before a run, so that it has
    been launched when the GPU comes to it."""
    if device == "cpu":
        for _ in range(WARMUP):
            run()
        return 0
    until, host_ms = time.perf_counter() + WARM_SECONDS, 0.0
    torch.cuda.synchronize()
    while time.perf_counter() < until:
        began = time.perf_counter()
        run()
        host_ms = (time.perf_counter() - began) * 1e3
        torch.cuda.synchronize()
    return round(cycles_of_a_millisecond() * max(QUEUED_MS, 1.5 * host_ms))


def cycles_of_a_millisecond() -> float:
    cycles = 10_000_000
    timer = Timer("cuda")
    timer.time(lambda: torch.cuda._sleep(cycles))
    return cycles / timer.ms()[0]


def stepper(make: Callable[..., Any], tensors: int, elements: int, device: str, ours: bool) -> Any:
    params = [nn.Parameter(torch.ones(elements, device=device)) for _ in range(tensors)]
    optimizer = make(iter(params))
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, None
    if ours:
        optimizer = optfuse.fuse(optimizer)
    for p in params:
        p.grad = torch.full_like(p, 1e-3)
    return optimizer


def updates(
    optimizer: str, make: Callable[..., Any], device: str, repeats: int, smoke: bool
) -> Iterator[Update]:
    """Every shape, stock and ours."""
    for tensors, elements in SMOKE_SHAPES if smoke else SHAPES:
        both = {who: stepper(make, tensors, elements, device, who == OURS) for who in (STOCK, OURS)}
        gc.collect()
        runs = {who: partial(step, one) for who, one in both.items()}
        timers = {who: Timer(device, warm_up(run, device)) for who, run in runs.items()}
        before = {who: launches_of(who, one) for who, one in both.items()}
        for _ in range(repeats):
            for who, run in runs.items():
                timers[who].time(run)
        for who, timer in timers.items():
            made = launches_of(who, both[who]) - before[who]
            launches = made / repeats if who == OURS else None
            yield row(tensors, elements, who, timer, launches, BYTES[optimizer])
        del both, runs


def step(optimizer: Any) -> None:
    optimizer.step()
    optfuse.flush()


def launches_of(who: str, optimizer: Any) -> int:
    return optfuse.summary(optimizer).launches if who == OURS else 0


def row(
    tensors: int, elements: int, who: str, timer: Timer, launches: float | None, bytes_each: int
) -> Update:
    ms = median_interval(timer.ms())
    gb_per_s = tensors * elements * bytes_each / ms.median / 1e6
    return Update(tensors, elements, who, ms, median_interval(timer.host), gb_per_s, launches)
