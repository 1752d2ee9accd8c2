# SPDX-License-Identifier: BSD-3-Clause
"""Times small pieces of work in turn, so that what disturbs the machine
disturbs all of them."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

Key = TypeVar("Key")


def in_turn(
    cases: Mapping[Key, Callable[[], object]], rounds: int, repeats: Mapping[Key, int]
) -> dict[Key, list[float]]:
    """Microseconds of each case's runs; in a round each runs once untimed and
    then `repeats` times, in shuffled order."""
    found: dict[Key, list[float]] = {key: [] for key in cases}
    order = list(cases)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for key in order:
            found[key].append(_time(cases[key], repeats[key]))
    return found


def _time(run: Callable[[], object], repeats: int) -> float:
    run()
    collecting = gc.isenabled()
    gc.disable()
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    seconds = time.perf_counter() - begin
    if collecting:
        gc.enable()
    return seconds / repeats * 1e6
