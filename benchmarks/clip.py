# SPDX-License-Identifier: BSD-3-Clause
"""What clipping by the norm, and unscaling before it, cost with the update: an
MLP of 50 M float32 parameters and AdamW, stock with fused=True and forward
fusion in turns, from complete gradients to updated parameters. Nothing else of
the iteration is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from console import progress, title
from torch import Tensor, nn

import optfuse
from optfuse._ab.result import Interval, median_interval

LAYERS, WIDTH = 8, 2500
SCALE = 65536.0
# Bytes a parameter: what has to be moved, each array once for each pass over it.
# The norm reads 4; a factor reads and writes 8; the update 28 with the gradient.
BYTES = {"clip": (40, 32), "unscale, clip": (48, 32)}


@dataclass
class Part:
    """One variant of clip and step; the rounds' milliseconds."""

    params: list[nn.Parameter]
    run: Callable[[bool], None]
    ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Clipped:
    what: str
    stock: Interval
    ours: Interval
    speed: Interval
    equal_bits: bool

    def __str__(self) -> str:
        theirs, own = BYTES[self.what]
        return (
            f"{self.what + ' and step':<24} fused=True {self.stock} ms, {theirs} bytes a parameter;"
            f" forward {self.ours} ms, {own} bytes; {self.speed} times as fast;"
            f" bits {'equal' if self.equal_bits else 'DIFFER'}"
        )


def _part(fused: bool, max_norm: float) -> Part:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    if fused:
        optfuse.fuse(optimizer)
    clip = optfuse.clip_grad_norm_ if fused else nn.utils.clip_grad_norm_

    def run(scaled: bool) -> None:
        if scaled:
            scaler.unscale_(optimizer)
        clip(params, max_norm)
        if scaled:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        for p in params:  # as the next forward pass would
            p.detach()

    scaler.scale(torch.zeros(()))
    return Part(params, run)


def _round(part: Part, gradients: list[Tensor], scaled: bool) -> None:
    for p, g in zip(part.params, gradients, strict=True):
        p.grad = g * SCALE if scaled else g.clone()
    begin = time.perf_counter()
    part.run(scaled)
    part.ms.append((time.perf_counter() - begin) * 1e3)
    for p in part.params:
        p.grad = None


def _same(a: Part, b: Part) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.params, b.params, strict=True))


def clipped(rounds: int) -> Iterator[Clipped]:
    """Interleaved; every gradient is larger than the norm that is allowed."""
    stock, ours = _part(False, 1.0), _part(True, 1.0)
    gradients = [torch.randn_like(p) for p in stock.params]
    for what in BYTES:
        for part in (stock, ours):
            part.ms.clear()
        for i in range(rounds + 2):
            for part in (stock, ours) if i % 2 else (ours, stock):
                _round(part, gradients, what != "clip")
        theirs, own = stock.ms[2:], ours.ms[2:]
        speed = [a / b for a, b in zip(theirs, own, strict=True)]
        yield Clipped(
            what,
            median_interval(theirs),
            median_interval(own),
            median_interval(speed),
            _same(stock, ours),
        )


def section(chosen: Any) -> dict[str, Any]:
    title("Clipping and update of an MLP of 50 M parameters, nothing else")
    found = []
    for one in clipped(rounds=15 if chosen.quick else 40):
        progress("")
        print(one, flush=True)
        progress("clip: measuring")
        found.append(asdict(one))
    return {"bytes": BYTES, "clipped": found}
