# SPDX-License-Identifier: BSD-3-Clause
"""The cost of K-FAC in steps and memory, on one process: a step that collects factors, one that
inverts them, one that does neither, and stock's, in turn."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from cells import MODELS, Cell, batches, iteration
from compare import in_time
from figures import columns, progress, title

import optfuse
from optfuse_tools.ab.result import Interval, median_interval

CELLS = (Cell("MLP", 128, 1), Cell("ResNet-18", 8, 1), Cell("GPT", 8, 1))
SMOKE = CELLS[:1]
#: A step's kind is its number modulo 3; the first steps of all are of another kind.
PLAIN, FACTORS, INVERSES, STOCK = "plain", "factors", "inverses", "stock"
KINDS = (PLAIN, FACTORS, INVERSES)
SCHEDULE = ("factors_every", "inverses_every")
NEVER = 1 << 40
FEWEST, MOST = 4, 30  # rounds


@dataclass(frozen=True)
class Cost:
    model: str
    batch: int
    layers: int
    rounds: int
    ms: dict[str, Interval]  # of an iteration, by kind
    parameter_mb: float
    factor_mb: float  # running factors and the sums of a collection
    inverse_mb: float


def is_due(kind: str) -> Any:
    """A function of the step for factors_every or inverses_every."""
    return lambda step: 1 if KINDS[step % len(KINDS)] == kind else NEVER


def cost(cell: Cell, seconds: float, most: int) -> Cost:
    def training(with_kfac: bool) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = MODELS[cell.model]()
        opt = torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9, fused=True)
        schedule = {"factors_every": is_due(FACTORS), "inverses_every": is_due(INVERSES)}
        kfac = optfuse.kfac(model, opt, **schedule) if with_kfac else None
        return iteration(model, opt, batches(cell)), kfac

    ours, kfac = training(True)
    stock, _ = training(False)
    for _ in range(len(KINDS)):
        ours()
    found: dict[str, list[float]] = {kind: [] for kind in (STOCK, *KINDS)}
    began = time.perf_counter()
    while len(found[STOCK]) < FEWEST or (
        time.perf_counter() - began < seconds and len(found[STOCK]) < most
    ):
        stock()
        for kind, step in ((STOCK, stock), *((kind, ours) for kind in KINDS)):
            start = time.perf_counter()
            step()
            found[kind].append(1e3 * (time.perf_counter() - start))
    said = kfac.summary()
    return Cost(
        model=cell.model,
        batch=cell.batch,
        layers=len(said.preconditioned),
        rounds=len(found[STOCK]),
        ms={kind: median_interval(ms) for kind, ms in found.items()},
        parameter_mb=sum(p.nbytes for p in MODELS[cell.model]().parameters()) / 1e6,
        factor_mb=said.factor_bytes / 1e6,
        inverse_mb=said.inverse_bytes / 1e6,
    )


def table(found: list[Cost]) -> str:
    rows = [("", "layers", "stock", *KINDS, "parameters MB", "factors MB", "inverses MB")]
    for one in found:
        rows.append(
            (f"{one.model}, batch {one.batch}", str(one.layers),
             *(str(one.ms[kind]) for kind in (STOCK, *KINDS)),
             *(f"{mb:.1f}" for mb in (one.parameter_mb, one.factor_mb, one.inverse_mb)))
        )  # fmt: skip
    return columns(rows)


def costs(chosen: Any) -> list[Cost]:
    found = []
    for cell in in_time(list(SMOKE if chosen.smoke else CELLS), chosen):
        progress(str(cell))
        found.append(cost(cell, chosen.seconds, chosen.rounds or MOST))
    title("ms of steps by what K-FAC does in them, one process")
    print(table(found), flush=True)
    return found
