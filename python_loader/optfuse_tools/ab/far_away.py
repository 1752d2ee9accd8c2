# SPDX-License-Identifier: BSD-3-Clause
"""Weights that rounding does not explain: after which step, in which parameter, and by how much.
The variant and its reference train once more for that, side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from optfuse._arguments.check import label
from optfuse_tools.ab.result import STOCK, real
from optfuse_tools.ab.training import Training
from optfuse_tools.ab.variants import Wrap
from optfuse_tools.ab.verdict import limit_of, sentence


class MakeTraining(Protocol):
    """Makes a variant from the beginning."""

    def __call__(self, name: str, variant: Wrap) -> Training: ...


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest distance of an element, by the largest element; infinite where an element is NaN
    that is none in the reference."""
    if ours.numel() == 0 or ours.shape != theirs.shape:
        return 0.0
    a, b = real(ours).double(), real(theirs).double()
    known = b.isfinite()
    a, b = a[known], b[known]
    if not a.isfinite().all():
        return math.inf
    far = (a - b).abs().max().item() if a.numel() else 0.0
    return far / max(a.abs().max().item(), b.abs().max().item()) if far else 0.0


def farthest(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> tuple[float, int]:
    """The distance, and which parameter."""
    found = [_apart(*pair) for pair in zip(ours, theirs, strict=True)]
    return max(zip(found, range(len(found)), strict=True), default=(0.0, 0))


def _label(run: Training, index: int) -> str:
    groups = [(g, i) for o in run.optimizers for i, g in enumerate(o.param_groups)]
    labels = [label(g, i, j) for g, i in groups for j in range(len(g["params"]))]
    return labels[index]


def _first(
    ours: Training, theirs: Training, steps: int, limit: float
) -> tuple[int, float, int] | None:
    """The step after which a parameter is beyond the limit, the distance, and which parameter;
    None: not this time."""
    for step in range(1, steps + 1):
        ours.turn(1)
        theirs.turn(1)
        if ours.row.note or theirs.row.note:
            return None
        distance, index = farthest(ours.parameters(), theirs.parameters())
        if distance > limit:
            return step, distance, index
    return None


def far_away(
    runs: Sequence[Training], right: Training, make: MakeTraining, steps: int
) -> Iterator[str]:
    """Sentences, one for each variant with such weights. runs: those that train; right: the
    reference."""
    able = [run for run in runs if not run.row.note and run is not right]
    stock = [run for run in able if run.row.name in STOCK]
    theirs = right.parameters()
    spread = max((farthest(run.parameters(), theirs)[0] for run in stock), default=0.0)
    limit = limit_of(spread)
    for run in able:
        if run in stock or run.row.equal_bits:
            continue
        distance, index = farthest(run.parameters(), theirs)
        if distance <= limit:
            continue
        again = [make(one.row.name, one.variant) for one in (run, right)]
        found = _first(*again, steps, limit) or (steps, distance, index)
        step, distance, index = found
        name, parameter = run.row.name, _label(run, index)
        yield sentence(name, parameter, right.row.name, step, distance, spread)
