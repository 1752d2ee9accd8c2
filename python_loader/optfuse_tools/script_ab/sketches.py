# SPDX-License-Identifier: BSD-3-Clause
"""Distances of parameters in different processes, by the sketches that their probes have made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Found = dict[str, Any]  # by a probe


@dataclass(frozen=True)
class Far:
    """The parameter that is the farthest away after a step, and how far, by its size."""

    step: int  # of its optimizer
    optimizer: int
    index: int
    distance: float


def _apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Infinite where a parameter has NaN or infinities, and the reference has none."""
    if not all(map(math.isfinite, theirs)):
        return 0.0
    if not all(map(math.isfinite, ours)):
        return math.inf
    far = math.dist(ours, theirs)
    return far / max(math.hypot(*ours), math.hypot(*theirs)) if far else 0.0


def _of_one(ours: Found, theirs: Found) -> Iterator[Far]:
    """As many as both have sketched, step by step."""
    known = dict(ours["sketches"])
    for place, sketches in theirs["sketches"]:
        optimizer, _ = theirs["digests"][place]
        pairs = zip(known.get(place, []), sketches, strict=False)
        found = [(_apart(*pair), i) for i, pair in enumerate(pairs)]
        if found and ours["digests"][place][0] == optimizer:
            distance, index = max(found)
            step = sum(i == optimizer for i, _ in theirs["digests"][: place + 1])
            yield Far(step, optimizer, index, distance)


def distances(some: Iterable[Found], theirs: Found) -> Iterator[Far]:
    for ours in some:
        yield from _of_one(ours, theirs)


def first_beyond(limit: float, ours: Found, theirs: Found) -> Far | None:
    return next((far for far in _of_one(ours, theirs) if far.distance > limit), None)
