# SPDX-License-Identifier: BSD-3-Clause
"""Section rounding: one update of a large bfloat16 parameter that is rounded stochastically, beside
torch.optim.AdamW(fused=True), which rounds to nearest; and of bfloat16 matrices by Adafactor and
CAME beside their own lines. On one thread, in nanoseconds of the processor's time an element, so
that other programs disturb little; interleaved."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from figures import FUSED, columns, median_interval, title
from torch import nn
from torch.optim import Optimizer

import optfuse
from optfuse._rounding import factored
from optfuse.optim import CAME, Adafactor, AdamW

Run = Callable[[], object]
LARGE, SMALL = 1 << 24, 1 << 16  # elements: beyond all caches, and for --smoke
ROUNDS, SMOKE_ROUNDS, EAGER_ROUNDS = 31, 3, 3
ROUNDED: dict[str, dict[str, Any]] = {
    "to nearest, float32 state": {},
    "rounded, float32 state": {"stochastic_rounding": True},
    "rounded, bfloat16 state to nearest": {"stochastic_rounding": True},
    "state rounded, too": {"stochastic_rounding": True, "stochastic_state": True},
}
ISAS = ("avx512", "avx2")
EAGER = "step() by operators"
FACTORED: dict[str, Callable[..., Optimizer]] = {
    "Adafactor": Adafactor,
    "Adafactor, fixed rate": lambda params, **how: Adafactor(
        params, lr=1e-3, relative_step=False, scale_parameter=False, **how
    ),
    "CAME": lambda params, **how: CAME(params, lr=1e-3, **how),
}
MATRICES = {
    "8 x 1024 x 1024": [(1024, 1024)] * 8,
    "80 x 320 x 320": [(320, 320)] * 80,
    "40 shapes of about 320 x 320": [(300 + i, 340 - i) for i in range(40)],
    "4096 x 4096": [(4096, 4096)],
    "convolutions, 20 x 128 x 128 x 3 x 3": [(128, 128, 3, 3)] * 20,
}
FACTORED_ROUNDS = 9
ROUNDS_IT = {"stochastic_rounding": True}


def parameter(n: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(n, generator=generator).bfloat16())
    param.grad = torch.randn(n, generator=generator).bfloat16()
    return param


def fused(optimizer: Optimizer, isa: str) -> Run:
    """Its step, whose update runs before it returns. Raises optfuse.Error where the processor lacks
    the instructions."""
    before = os.environ.get("OPTFUSE_ISA")
    os.environ["OPTFUSE_ISA"] = isa
    try:
        optfuse.fuse(optimizer)
        optimizer.step()  # with it the state
        optfuse.flush()
    finally:
        os.environ.pop("OPTFUSE_ISA")
        if before is not None:
            os.environ["OPTFUSE_ISA"] = before

    def run() -> None:
        optimizer.step()
        optfuse.flush()

    return run


def with_narrow_state(optimizer: Optimizer) -> None:
    optimizer.step()
    for entry in optimizer.state.values():
        entry.update({name: entry[name].bfloat16() for name in AdamW.STATE})


def variants(n: int) -> dict[str, Run]:
    stock = torch.optim.AdamW([parameter(n)], fused=True)
    found: dict[str, Run] = {FUSED: stock.step}
    for isa in ISAS:
        for name, options in ROUNDED.items():
            try:
                optimizer = AdamW([parameter(n)], **options)
                if "bfloat16" in name:  # as from a checkpoint of torch.optim's
                    with_narrow_state(optimizer)
                found[f"{name}, {isa}"] = fused(optimizer, isa)
            except optfuse.Error as error:
                print(f"left out: {error}")
                break
    return found


def ns_each(run: Run, n: int) -> float:
    began = time.process_time()
    run()
    return (time.process_time() - began) / n * 1e9


def matrices(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    params = [parameter(math.prod(shape)) for shape in shapes]
    made = [nn.Parameter(p.detach().view(s)) for p, s in zip(params, shapes, strict=True)]
    for p, s, flat in zip(made, shapes, params, strict=True):
        assert flat.grad is not None
        p.grad = flat.grad.view(s)
    return made


def stepping(optimizer: Optimizer, by_lines: bool) -> Run:
    """By the class's own lines, or by its operator."""

    def run() -> None:
        before = factored._agree
        factored._agree = dict.fromkeys(before, not by_lines)
        try:
            optimizer.step()
        finally:
            factored._agree = before

    return run


def factored_updates(smoke: bool) -> list[dict[str, Any]]:
    rows = []
    for name, make in FACTORED.items():
        for what, all_shapes in MATRICES.items():
            shapes = [(8, 8)] if smoke else all_shapes
            ways: dict[str, dict[str, Any]] = {EAGER: {}, "to nearest": {}, "rounded": ROUNDS_IT}
            made = {how: make(matrices(shapes), **its) for how, its in ways.items()}
            for how, optimizer in made.items():
                if how != EAGER:
                    optfuse.fuse(optimizer)
            runs = {how: stepping(its, how == EAGER) for how, its in made.items()}
            times: dict[str, list[float]] = {how: [] for how in runs}
            for i in range(2 if smoke else FACTORED_ROUNDS + 1):
                for how, run in runs.items():
                    ns = ns_each(run, sum(map(math.prod, shapes)))
                    times[how] += [ns] if i else []
            ns = {how: median_interval(of) for how, of in times.items()}
            rows += [{"class": name, "what": what, "how": how, "ns": of} for how, of in ns.items()]
    return rows


def section(chosen: argparse.Namespace) -> dict[str, Any]:
    n = SMALL if chosen.smoke else LARGE
    rounds = chosen.rounds or (SMOKE_ROUNDS if chosen.smoke else ROUNDS)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runs = variants(n)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for i in range(rounds + 1):
            for name, run in runs.items():
                ns = ns_each(run, n)
                times[name] += [ns] if i else []  # the first one warms up
        eager = AdamW([parameter(n)], **ROUNDED["state rounded, too"])
        times[EAGER] = [ns_each(eager.step, n) for _ in range(EAGER_ROUNDS)]
        by_rows = factored_updates(chosen.smoke)
    finally:
        torch.set_num_threads(before)
    title(f"{n} elements of bfloat16: ns of processor an element, and by {FUSED}'s")
    rows, lines = [], []
    for name, ns in times.items():
        ratios = [a / b for a, b in zip(ns, times[FUSED], strict=False)]
        alone, ratio = median_interval(ns), median_interval(ratios)
        rows.append({"what": name, "ns": alone, "by_stock": ratio})
        lines.append([name, f"{alone.median:.3f}", str(ratio)])
    print(columns([["", "ns", f"by {FUSED}"], *lines]))
    title("bfloat16 matrices: ns of processor an element")
    print(columns([[*map(str, list(row.values())[:3]), str(row["ns"])] for row in by_rows]))
    return {"elements": n, "updates": rows, "factored": by_rows}
