# SPDX-License-Identifier: BSD-3-Clause
"""The beginning of a trial. A trial takes steps from the state that an optimizer has; a class may
do something else in earlier steps, or with other options. Where a script takes an optimizer back to
these, another trial has to come first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optfuse._own_step.settings import Promise
from optfuse._own_step.twin import Entry, attributes_of, own_options

Place = tuple[Any, ...]  # of a number
MOST = 3  # trials for one number that gets less: after these the class itself makes it so


def _number(value: Any) -> float | None:
    """A counter, as it may be; None: it is none."""
    if isinstance(value, Tensor):
        is_one = value.dim() == 0 and value.device.type == "cpu" and not value.is_complex()
        return float(value) if is_one else None
    return float(value) if type(value) in (int, float) else None


def _look_of(value: Any, name: str = "") -> tuple[Any, ...]:
    """Floats that are not 0 lead the same way; rates of 0 are none in a trial."""
    if type(value) is float:
        return float, value == 0 and name != "lr"
    if type(value) in (tuple, list):
        return type(value), *map(_look_of, value)
    is_plain = type(value) in (bool, int, str, type(None))
    return (type(value), value) if is_plain else (type(value),)


class Tried:
    """The least that trials have begun with."""

    def __init__(self, optimizer: Optimizer, promise: Promise) -> None:
        self._looks: list[Any] = []  # of options that step() does not change
        self._least: dict[Place, float] = {}
        self._some_empty = False  # parameters without state were tried
        self._less: list[Place] = []  # that is_before() has found last
        self._falls: Counter[Place] = Counter()
        self.know(optimizer, promise)

    def know(self, optimizer: Optimizer, promise: Promise) -> None:
        """A trial that has begun here has found this."""
        self._promise = promise
        self._values = list(_values(optimizer))
        self._looks.append(self._looks_of(optimizer))
        for place, x in (*self._numbers(optimizer), *_numbers_of_state(optimizer)):
            self._least[place] = min(x, self._least.get(place, x))
        self._counts = any(place[0] == "state" for place in self._least)
        self._some_empty |= not all(_entries(optimizer))
        self._falls.update(self._less)
        self._less = []

    def is_before(self, optimizer: Optimizer, same_state: bool) -> bool:
        """Whether the optimizer is where no trial has begun, or behind. same_state: nobody but its
        updates has changed the state."""
        numbers = self._numbers(optimizer)
        if not same_state and self._counts:
            numbers += _numbers_of_state(optimizer)
        self._less = [place for place, x in numbers if x < self._least.get(place, x)]
        return (
            self._has_other_options(optimizer)
            or any(self._falls[place] < MOST for place in self._less)
            or (not same_state and not self._some_empty and not all(_entries(optimizer)))
        )

    def _has_other_options(self, optimizer: Optimizer) -> bool:
        now = list(_values(optimizer))
        if len(now) == len(self._values) and all(map(is_, now, self._values)):
            return False
        looks = self._looks_of(optimizer)
        if not any(_are_alike(looks, tried) for tried in self._looks):
            return True
        self._values = now
        return False

    def _looks_of(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        changing = self._promise.options
        return [
            {k: _look_of(v, k) for k, v in own_options(group).items() if k not in changing}
            for group in optimizer.param_groups
        ]

    def _numbers(self, optimizer: Optimizer) -> list[tuple[Place, float]]:
        """Options and attributes that step() changes."""
        own = attributes_of(optimizer) if self._promise.attributes else {}
        held: list[tuple[Place, Any]] = [
            (("attribute", name), own.get(name)) for name in self._promise.attributes
        ]
        for i, group in enumerate(optimizer.param_groups):
            held += [((i, name), group.get(name)) for name in self._promise.options]
        return list(_numbers_in(held))


def _are_alike(now: list[dict[str, Any]], tried: list[dict[str, Any]]) -> bool:
    """Schedulers add numbers of their own."""
    return len(now) == len(tried) and all(
        was.keys() <= options.keys()
        and all(
            was.get(name) == look or (name not in was and look[0] in (int, float))
            for name, look in options.items()
        )
        for options, was in zip(now, tried, strict=True)
    )


def _numbers_in(held: Iterable[tuple[Place, Any]]) -> Iterator[tuple[Place, float]]:
    for place, value in held:
        number = _number(value)
        if number is not None:
            yield place, number
        elif isinstance(value, dict):
            yield from _numbers_in(((*place, key), item) for key, item in value.items())


def _values(optimizer: Optimizer) -> Iterator[Any]:
    return chain.from_iterable(group.values() for group in optimizer.param_groups)


def _entries(optimizer: Optimizer) -> list[Entry]:
    """The entries of the parameters that are trained."""
    state = optimizer.__dict__["state"]
    params = (p for group in optimizer.param_groups for p in group["params"])
    entries = (state.get(p) for p in params if p.requires_grad)
    return [entry if isinstance(entry, dict) else {} for entry in entries]


def _numbers_of_state(optimizer: Optimizer) -> list[tuple[Place, float]]:
    items = chain.from_iterable(entry.items() for entry in _entries(optimizer))
    return list(_numbers_in((("state", key), value) for key, value in items))
