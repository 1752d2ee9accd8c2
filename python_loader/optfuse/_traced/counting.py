# SPDX-License-Identifier: BSD-3-Clause
"""The counters of a step() in state entries, as numbers and as tensors without dimensions: after
one run on one of the parameters that are alike, all their entries get its results."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optfuse._own_step.twin import CONSTANT, Entry
from optfuse._traced.guide import Place


@dataclass
class Counting:
    """The state entries of a cohort whose parameters all have one, after a step."""

    entries: list[Entry]
    keys: list[Any]  # of each entry
    counters: dict[Any, list[Tensor]]  # by key: those of all entries


def find_counters(entries: list[Entry], after: Entry) -> Counting:
    """Gives the entries the keys of `after` and tensors for its counters."""
    counters: dict[Any, list[Tensor]] = {}
    for key, value in after.items():
        if isinstance(value, Tensor):
            counters[key] = [_counter(entry, key, value) for entry in entries]
    for entry in entries:
        for key in entry.keys() - after.keys():
            del entry[key]
    return Counting(entries, list(after), counters)


def _counter(entry: Entry, key: Any, value: Tensor) -> Tensor:
    known = entry.get(key)
    if not isinstance(known, Tensor) or known.shape != value.shape:
        entry[key] = known = value.detach().clone()
    return known


def advance(counting: Counting, after: Entry) -> tuple[list[Tensor], list[Tensor]]:
    """Counters in state entries become those of `after`; the tensors among them, and the values
    that they get."""
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for key, value in after.items():
        if isinstance(value, Place):
            continue
        if isinstance(value, Tensor):
            counters = counting.counters[key]
            targets += counters
            sources += len(counters) * [value]
        elif isinstance(value, CONSTANT):
            for entry in counting.entries:
                entry[key] = value
        else:
            for entry in counting.entries:
                entry[key] = copy.deepcopy(value)
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
    return targets, sources
