# SPDX-License-Identifier: BSD-3-Clause
"""Dicts by parameter in an optimizer's attributes, as a trial compares them: parameters, views of
them and their addresses are told by the number of the parameter and the place in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from optfuse._own_step.reach import span_of
from optfuse._trials.compare import deep_copy, difference

Maps = dict[str, dict[Any, Any]]


class Places:
    """The places of some parameters in memory."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._params = list(params)
        self._spans = [span_of(param) for param in self._params]

    def told(self, maps: Maps) -> Maps:
        """Copies of them, with places instead of parameters."""
        told = {
            name: {self._told(key): self._told(value) for key, value in items.items()}
            for name, items in maps.items()
        }
        return deep_copy(told, "the optimizer's attributes")  # type: ignore[no-any-return]

    def _told(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._told_tensor(value)
        if type(value) is int:
            return self._told_number(value)
        if type(value) in (list, tuple):
            return type(value)(map(self._told, value))
        if type(value) is dict:
            return {self._told(key): self._told(item) for key, item in value.items()}
        return value

    def _told_tensor(self, tensor: Tensor) -> Any:
        for i, param in enumerate(self._params):
            if tensor is param:
                return "parameter", i
        span = span_of(tensor)
        owner, offset = (None, 0) if span is None else self._place(span[1], span[0])
        if owner is None:
            return tensor.detach()
        return "view", owner, offset, tensor.shape, tensor.stride(), tensor.dtype

    def _told_number(self, number: int) -> Any:
        for i, param in enumerate(self._params):
            if number == id(param):
                return "id", i
        owner, offset = self._place(number)
        return number if owner is None else ("address", owner, offset)

    def _place(self, address: int, device: str | None = None) -> tuple[int | None, int]:
        """The parameter, and the offset in it."""
        for i, span in enumerate(self._spans):
            if span is not None and span[1] <= address < span[2] and device in (None, span[0]):
                return i, address - span[1]
        return None, 0


def why_maps_differ(before: Maps, after: Maps, alone: Maps) -> str | None:
    """Why a step on all has not left the maps that steps on one after the other leave. alone: the
    items of these, from a start with empty maps."""
    for name, items in after.items():
        was, own = before[name], alone[name]
        how = f"its attribute {name!r} has other items when parameters are stepped by themselves"
        if was.keys() - items.keys():
            return f"it takes items out of its attribute {name!r}"
        changed = {k for k in items if k not in was or _differ(was[k], items[k])}
        if changed - own.keys() or own.keys() - items.keys():
            return how
        if any(_differ(own[key], items[key]) for key in own):
            return how
    return None


def _differ(a: Any, b: Any) -> bool:
    return difference("", a, b) is not None
