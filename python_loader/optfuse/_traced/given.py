# SPDX-License-Identifier: BSD-3-Clause
"""Numbers that operators are given while a replay is learned: what becomes of each is noted."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

Place = tuple[int, int, int]  # operator, argument, element


@dataclass(eq=False)
class Given:
    """In the place of a number. On a tape it stands for a number that may be another one at the
    next step; the tape itself must not depend on it, or it is pinned."""

    value: Any
    place: Place
    pinned: set[Place]
    sign: int = 1
    dtype: torch.dtype | None = None  # of a tensor without dimensions

    def times(self, factor: float) -> Given | float:
        if factor in (1.0, -1.0):
            return Given(self.value, self.place, self.pinned, int(factor) * self.sign, self.dtype)
        return factor * float(self)

    def now(self) -> float:
        """Its value."""
        value = float(self.value)
        return value if self.sign == 1 else -1.0 * value

    def pin(self) -> Any:
        """Its value, on which the tape depends then."""
        self.pinned.add(self.place)
        return self.value

    def __float__(self) -> float:
        self.pinned.add(self.place)
        return self.now()

    def __abs__(self) -> float:
        return abs(float(self))

    def __bool__(self) -> bool:
        return bool(float(self))

    def __eq__(self, other: object) -> bool:
        return float(self) == other

    def __hash__(self) -> int:
        return hash(float(self))

    def __index__(self) -> NoReturn:
        raise TypeError("a number that may be another one at the next step")


def given_to(func: Any, call: int, args: Any, options: Any, pinned: set[Place]) -> Any:
    """The arguments and options of an operator with a Given for each number. Whole numbers that
    are sizes and the like stay as they are."""
    args, options = list(args), dict(options)
    for i, name in _taking_numbers(func):
        if i < len(args):
            args[i] = _given(args[i], call, i, pinned)
        elif name in options:
            options[name] = _given(options[name], call, i, pinned)
    return tuple(args), options


@functools.cache
def _taking_numbers(func: Any) -> list[tuple[int, str]]:
    """Arguments by their places and names."""
    kinds = [(i, a.name, str(a.type)) for i, a in enumerate(func._schema.arguments)]
    found = ("number", "float", "Tensor")
    return [(i, name) for i, name, kind in kinds if any(x in kind for x in found)]


def _given(value: Any, call: int, argument: int, pinned: set[Place]) -> Any:
    if isinstance(value, bool | int | float):
        return Given(value, (call, argument, 0), pinned)
    if _is_number(value):
        return Given(float(value), (call, argument, 0), pinned, dtype=value.dtype)
    if isinstance(value, list | tuple) and any(isinstance(x, bool | int | float) for x in value):
        return [Given(x, (call, argument, i), pinned) for i, x in enumerate(value)]
    return value


def _is_number(value: Any) -> bool:
    """Whether it is a tensor without dimensions that the library reads as a number."""
    is_plain = type(value) is torch.Tensor and value.ndim == 0 and value.device.type == "cpu"
    return is_plain and not value.is_complex() and not value.requires_grad
