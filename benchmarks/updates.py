# SPDX-License-Identifier: BSD-3-Clause
"""The update alone: step() of stock's fused=True and of optfuse, with all that
it leaves pending launched, over the same tensors, in turn."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import optfuse
from optfuse._ab_result import Interval, median_interval

STOCK, OURS = "fused=True", "forward fusion, flushed"
#: Tensors and elements of each.
SHAPES = ((1, 1 << 20), (1, 1 << 24), (1, 1 << 26), (160, 22_000), (256, 1 << 16), (1000, 1000))
SMOKE_SHAPES = ((1, 1 << 10), (20, 100))
BYTES = {"adamw": 28, "adam": 28, "momentum": 20, "sgd": 12}  # an element, float32
WARMUP = 5


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

    def __init__(self, device: str) -> None:
        self.device = device
        self.spans: list[tuple[Any, Any]] = []
        self.host: list[float] = []

    def moment(self) -> Any:
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def time(self, run: Callable[[], None]) -> None:
        start, began = self.moment(), time.perf_counter()
        run()
        self.host.append((time.perf_counter() - began) * 1e3)
        self.spans.append((start, self.moment()))

    def ms(self) -> list[float]:
        if self.device == "cpu":
            return [(end - start) * 1e3 for start, end in self.spans]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in self.spans]


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
        timers = {who: Timer(device) for who in both}
        gc.collect()
        for i in range(WARMUP + repeats):
            for who, one in both.items():
                timer = timers[who] if i >= WARMUP else Timer(device)
                timer.time(lambda one=one: step(one))
        for who, timer in timers.items():
            yield row(tensors, elements, who, timer, both[who], BYTES[optimizer])
        del both


def step(optimizer: Any) -> None:
    optimizer.step()
    optfuse.flush()


def row(
    tensors: int, elements: int, who: str, timer: Timer, optimizer: Any, bytes_each: int
) -> Update:
    ms = median_interval(timer.ms())
    steps = len(timer.spans) + WARMUP
    launches = optfuse.summary(optimizer).launches / steps if who == OURS else None
    gb_per_s = tensors * elements * bytes_each / ms.median / 1e6
    return Update(tensors, elements, who, ms, median_interval(timer.host), gb_per_s, launches)
