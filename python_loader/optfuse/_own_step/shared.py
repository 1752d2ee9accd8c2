# SPDX-License-Identifier: BSD-3-Clause
"""The objects that a class's step() writes into. An update of one parameter works on copies of
options and attributes: what two of them share, or the state of two parameters, would be several
objects in these."""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optfuse._library.bindings import guard
from optfuse._own_step.reach import reachable, span_of
from optfuse._own_step.twin import attributes_of, own_attributes, own_options

Written = frozenset[tuple[str, Any]]  # "attribute", "option" or "state", and its name
_KEPT = (tuple, frozenset, types.FunctionType, types.MethodType, weakref.ref)
_PLAIN = (Tensor, list, dict, set, deque, tuple, frozenset)


def why_writes_too_much(optimizer: Optimizer, written: Written) -> str | None:
    """Why a step() with these writes can't work on copies; None: it can."""
    if not written or not guard("reach"):
        return None
    objects: dict[int, tuple[str, bool]] = {}
    memory: list[tuple[tuple[str, int, int], str, bool]] = []
    for kind, name, place, value in _places(optimizer):
        writes = (kind, name) in written
        for found in reachable(value):
            if writes and kind != "state" and not isinstance(found, _PLAIN):
                return f"it writes into {place}, which holds an object of {type(found).__name__}"
            span = span_of(found) if isinstance(found, Tensor) else None
            if span is not None:
                memory.append((span, place, writes))
            elif not isinstance(found, _KEPT):
                other, also = objects.setdefault(id(found), (place, writes))
                if other != place and (writes or also):
                    return _why(other, place)
    return _why_memory(memory)


def _places(optimizer: Optimizer) -> Iterator[tuple[str, Any, str, Any]]:
    for name, value in own_attributes(attributes_of(optimizer)).items():
        yield "attribute", name, f"its attribute {name!r}", value
    for i, group in enumerate(optimizer.param_groups):
        for name, value in own_options(group).items():
            yield "option", name, f"the option {name!r} of group {i}", value
    for i, entry in enumerate(optimizer.__dict__["state"].values()):
        for name, value in entry.items() if isinstance(entry, dict) else ():
            yield "state", name, f"the state of parameter {i} that has any", value


def _why_memory(memory: list[tuple[tuple[str, int, int], str, bool]]) -> str | None:
    """Names two tensors in different places that overlap, if one of them is written."""
    last: tuple[str, int] = "", 0  # where those that overlap end
    place, writes = "", False
    for (where, begin, end), here, is_written in sorted(memory):
        if last <= (where, begin):
            place, writes = here, False
        writes |= is_written
        if here != place and writes:
            return _why(place, here)
        last = max(last, (where, end))
    return None


def _why(one: str, other: str) -> str:
    return f"it writes into an object that {one} and {other} share; give each one of its own"
