# SPDX-License-Identifier: BSD-3-Clause
"""Section forecast: AdamW's part in whole iterations in CUDA graphs on an H200, by a model of
launches and bytes. It measures nothing, and says so; section captured measures these cells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from captured import CELLS, Captured
from cells import MODELS
from figures import columns, title

BYTES = 28  # of an element: weight, gradient and two moments are read, all but the gradient written
#: Ours, after gpu-run-h200.json: us that a launch takes to start, bytes a us, bytes of a bucket.
START, SPEED, BUCKET = 4.5, 4.3e6, 16 << 20
#: fused=True, after kernels-adamw-h200.json: a launch has at most so many tensors and blocks. A
#: block takes us for its elements, however few there are, and many are as slow as the
#: multiprocessor that has most of them.
FUSED_START, FUSED_SPEED, TENSORS, BLOCKS, PROCESSORS = 3.5, 4.0e6, 36, 320, 132
BLOCK, BLOCK_US, COUNTERS_US, COUNTED = 65536, 33.0, 2.5, 110
HIDDEN = 0.5  # assumed: of what a side stream could hide, which is all but the last two launches
#: Milliseconds of an iteration without an optimizer, least and most: measured in
#: cells-adamw-h200.json, or assumed. GPT-2 at batch 8: 40 to 60 TFLOP/s; the others by their
#: numbers of kernels.
WITHOUT = {
    ("GPT-2", 1): (15.3, 15.3),
    ("MobileNetV2", 32): (14.7, 14.7),
    ("GPT-2", 8): (55.0, 82.0),
    ("ResNet-50", 1): (2.5, 5.0),
    ("MLP", 8): (0.35, 0.7),
}


def sizes(model: str) -> list[int]:
    with torch.device("meta"):
        return [p.numel() for p in MODELS[model]().parameters()]


def launches(elements: list[int]) -> list[int]:
    """Elements of each launch of backward mode, in which the last parameter's gradient is first."""
    found, waiting = [], 0
    for n in reversed(elements):
        waiting += n
        if 4 * waiting >= BUCKET:
            found.append(waiting)
            waiting = 0
    return [*found, waiting] if waiting else found


def of_fused(elements: list[int]) -> Iterator[list[int]]:
    """Elements of each block of each launch."""
    blocks: list[int] = []
    tensors = 0
    for n in elements:
        tensors += 1
        for begin in range(0, n, BLOCK):
            blocks.append(min(BLOCK, n - begin))
            is_last = begin + BLOCK >= n
            if len(blocks) == BLOCKS or (tensors == TENSORS and is_last):
                yield blocks
                blocks, tensors = [], 0 if is_last else 1
    if blocks:
        yield blocks


def fused_us(elements: list[int]) -> float:
    def launch(blocks: list[int]) -> float:
        alone = BLOCK_US * max(blocks) / BLOCK
        most = -(-len(blocks) // PROCESSORS) * PROCESSORS / len(blocks)
        share = most if len(blocks) > PROCESSORS else 1.0
        return FUSED_START + max(alone, share * BYTES * sum(blocks) / FUSED_SPEED)

    counting = COUNTERS_US * -(-len(elements) // COUNTED)
    return sum(map(launch, of_fused(elements))) + counting


def ours_us(of: list[int]) -> float:
    return sum(START + BYTES * n / SPEED for n in of)


@dataclass(frozen=True)
class Forecast:
    cell: str
    without_ms: tuple[float, float]
    update_us: dict[str, float]
    times_fused: dict[str, tuple[float, float]]  # least and most

    def cells(self) -> tuple[str, ...]:
        without = between(self.without_ms, "g")
        updates = (f"{us:.0f}" for us in self.update_us.values())
        return (
            self.cell,
            without,
            *updates,
            *(between(x, ".3f") for x in self.times_fused.values()),
        )


def between(pair: tuple[float, float], form: str) -> str:
    low, high = (format(x, form) for x in pair)
    return low if low == high else f"{low} to {high}"


def forecast(cell: Captured) -> Forecast:
    elements, without = sizes(cell.model), WITHOUT[cell.model, cell.batch]
    buckets = launches(elements)
    fused, backward = fused_us(elements), START + ours_us(buckets)  # one launch counts
    shown = backward - HIDDEN * ours_us(buckets[:-2])
    ours = {"backward": backward, "side stream": shown, "forward": START + ours_us([sum(elements)])}

    def speed(own: float) -> tuple[float, float]:
        low, high = sorted((1000 * ms + fused) / (1000 * ms + own) for ms in without)
        return low, high

    times = {name: speed(us) for name, us in ours.items()}
    return Forecast(str(cell), without, {"fused": fused, **ours}, times)


def section(_: Any) -> dict[str, Any]:
    title("Forecast, not measured: captured iterations on an H200, times as fast as fused=True")
    found = [forecast(cell) for cell in CELLS]
    head = ("", "ms without", *(f"{name}, us" for name in found[0].update_us))
    print(columns([(*head, *found[0].times_fused), *(one.cells() for one in found)]))
    return {"measured": False, "forecast": found}
