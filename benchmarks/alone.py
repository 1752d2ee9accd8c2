# SPDX-License-Identifier: BSD-3-Clause
"""The kernels alone, in memory: one tensor of 50 M parameters, updated by
step() and a flush, in turns with a pass of the no-math kernel over as much; in
a cache (in_cache.py); and where others have read the weights (shared_weights.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from cells import OPTIMIZERS
from console import columns, title
from floor import Floor, available, bytes_each
from in_cache import in_cache
from interleave import in_turn
from resample import of_medians
from shared_weights import shared_weights
from torch import nn
from variants import few_variants

import optfuse
from optfuse._ab.result import Interval

ELEMENTS, SMOKE_ELEMENTS = 50_000_000, 1 << 20
RULES = (
    ("adamw", torch.float32),
    ("adamw", torch.bfloat16),
    ("sgd", torch.float32),
    ("momentum", torch.float32),
)
FLOOR, STOCK, OURS = "floor", "fused=True", "forward fusion"
AIM = 0.9  # of the floor's speed


@dataclass(frozen=True)
class Alone:
    optimizer: str
    dtype: str
    threads: int
    bytes_each: int
    floor_gb_per_s: float
    stock: Interval  # speed, of the floor's
    ours: Interval


def stepper(optimizer: str, dtype: torch.dtype, variant: str, elements: int) -> Callable[[], None]:
    p = nn.Parameter(torch.zeros(elements, dtype=dtype))
    opt = few_variants()[variant](OPTIMIZERS[optimizer](iter([p])))
    p.grad = torch.full_like(p, 1e-3)

    def run() -> None:
        opt.step()
        optfuse.flush()

    run()
    return run


def measure(optimizer: str, dtype: torch.dtype, elements: int, rounds: int) -> Alone:
    floor = Floor(optimizer, elements, dtype.itemsize)
    cases: dict[str, Callable[[], None]] = {FLOOR: floor.run}
    cases |= {name: stepper(optimizer, dtype, name, elements) for name in (STOCK, OURS)}
    us = in_turn(cases, rounds, dict.fromkeys(cases, 1))
    least = bytes_each(optimizer, dtype.itemsize)
    gb_per_s = least * elements / of_medians(lambda f: f, us[FLOOR]).median / 1e3
    stock, ours = (of_medians(lambda f, o: f / o, us[FLOOR], us[name]) for name in (STOCK, OURS))
    name = str(dtype).removeprefix("torch.")
    return Alone(optimizer, name, torch.get_num_threads(), least, gb_per_s, stock, ours)


def section(chosen: Any) -> dict[str, Any] | None:
    elements = SMOKE_ELEMENTS if chosen.smoke else ELEMENTS
    title(f"Kernels alone, {elements:,} parameters: share of the no-math kernel's speed")
    if not available:
        print("not measured: libfloor.so was not built")
        return None
    rounds = chosen.rounds or (5 if chosen.smoke or chosen.quick else 30)
    found = [measure(*rule, elements, rounds) for rule in RULES]
    rows = [("", "bytes", "floor, GB/s", STOCK, "optfuse", f"at least {AIM:.0%}")]
    for one in found:
        rows.append(
            (
                f"{one.optimizer} {one.dtype}",
                str(one.bytes_each),
                f"{one.floor_gb_per_s:.1f}",
                str(one.stock),
                str(one.ours),
                "yes" if one.ours.median >= AIM else "NO",
            )
        )
    print(columns(rows))
    cached = in_cache(3 if chosen.smoke or chosen.quick else 11)
    shared = shared_weights(12 if chosen.smoke or chosen.quick else 60)
    return {
        "elements": elements,
        "rules": [asdict(one) for one in found],
        "in_cache": [asdict(one) for one in cached or ()],
        "shared_weights": [asdict(one) for one in shared or ()],
    }
