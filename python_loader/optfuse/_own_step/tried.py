# SPDX-License-Identifier: BSD-3-Clause
"""The beginning of a trial. A trial takes steps from the state that an optimizer has; a class may
do something else in earlier steps, or with other options. Where a script takes an optimizer back to
these, another trial has to come first."""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optfuse._own_step.looks import numbers_in, reads_option
from optfuse._own_step.settings import Promise
from optfuse._own_step.twin import Entry, attributes_of, own_attributes, own_options, unbound

Place = tuple[Any, ...]  # of a number, or of an option or attribute
Looks = list[dict[str, tuple[Any, ...]]]  # of each group, and last of the optimizer
MOST = 3  # trials for one number that changes: after these the script or the class makes it so


def _number(value: Any) -> float | None:
    """A counter, as it may be; None: it is none."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_complex() else None
    return float(value) if type(value) in (int, float) else None


class Tried:
    """The least that trials have begun with."""

    def __init__(self, optimizer: Optimizer, stock: type[Optimizer], promise: Promise) -> None:
        self._may_read = reads_option(stock, optimizer)
        self._bounds = numbers_in(stock)
        self._looks: list[Looks] = []  # of what step() does not change
        self._changes: Counter[Place] = Counter()  # of whole numbers among that
        self._least: dict[Place, float] = {}
        self._some_empty = False  # parameters without state were tried
        self._less: list[Place] = []  # that is_before() has found last
        self._falls: Counter[Place] = Counter()
        self.know(optimizer, promise)

    def copy(self) -> Tried:
        """For a copy of the optimizer."""
        twin = copy.copy(self)
        twin._looks, twin._least, twin._values = list(self._looks), dict(self._least), []
        twin._changes, twin._falls, twin._less = Counter(self._changes), Counter(self._falls), []
        return twin

    @property
    def counts(self) -> bool:
        """Whether there are numbers in the state."""
        return any(place[0] == "state" for place in self._least)

    def know(self, optimizer: Optimizer, promise: Promise) -> None:
        """A trial that has begun here has found this."""
        self._promise = promise
        self._values = _values(optimizer)
        self._count_changes(self._looks_of(optimizer))
        self._looks.append(self._looks_of(optimizer))
        for place, x in (*self._numbers(optimizer), *_numbers_of_state(optimizer)):
            self._least[place] = min(x, self._least.get(place, x))
        self._some_empty |= not all(entry for _, entry in _entries(optimizer))
        self._falls.update(self._less)
        self._less = []

    def is_before(self, optimizer: Optimizer, same_state: bool) -> bool:
        """Whether the optimizer is where no trial has begun, or behind. same_state: nobody but its
        updates has changed the state."""
        numbers = self._numbers(optimizer)
        if not same_state and self.counts:
            numbers += _numbers_of_state(optimizer)
        self._less = [place for place, x in numbers if x < self._least.get(place, x)]
        return (
            self._has_other_options(optimizer)
            or any(self._falls[place] < MOST for place in self._less)
            or (
                not same_state
                and not self._some_empty
                and not all(entry for _, entry in _entries(optimizer))
            )
        )

    def _has_other_options(self, optimizer: Optimizer) -> bool:
        now = _values(optimizer)
        same = len(now) == len(self._values) and all(map(is_, now, self._values))
        if same and not self._has_lists:
            return False
        looks = self._looks_of(optimizer)
        if not any(_are_alike(looks, tried) for tried in self._looks):
            return True
        self._values = now
        return False

    def _looks_of(self, optimizer: Optimizer) -> Looks:
        """Options and attributes that the class's code may read and step() does not change. Its
        lists may grow."""
        promise, own = self._promise, own_attributes(unbound(optimizer.__dict__, optimizer))
        held = [(own_options(group), promise.options) for group in optimizer.param_groups]
        plain = {k: v for k, v in own.items() if type(v) is not list and k != "defaults"}
        held.append((plain, promise.attributes))
        looks = []
        for i, (values, changing) in enumerate(held):
            read = {k: v for k, v in values.items() if k not in changing and self._may_read(k)}
            others = {k: v for k, v in read.items() if k in own.get("defaults", ()) and k != "lr"}
            among = sorted({*self._bounds, *_numbers_among(others.values())})
            looks.append({name: self._look((i, name), v, among) for name, v in read.items()})
        self._has_lists = any(look[0] is list for each in looks for look in each.values())
        return looks

    def _look(self, place: Place, value: Any, among: list[float]) -> tuple[Any, ...]:
        """Numbers lead the same way between two with which the class's code may compare them:
        those that it names, and the other options. A trial changes rates by itself."""
        if type(value) is float:
            return float, *(_between(value, among) if place[1] != "lr" else ())
        if type(value) in (tuple, list):
            return type(value), *(self._look((place[0], ""), item, among) for item in value)
        if type(value) is int and self._changes[place] >= MOST:
            return int, *_between(value, among)
        is_plain = type(value) in (bool, int, str, type(None))
        return (type(value), value) if is_plain else (type(value),)

    def _count_changes(self, looks: Looks) -> None:
        last = self._looks[-1] if self._looks else looks
        for i, (now, then) in enumerate(zip(looks, last, strict=False)):
            for name, look in now.items():
                if look[0] is int and then.get(name, look) != look:
                    self._changes[i, name] += 1

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


def _numbers_among(values: Iterable[Any]) -> Iterator[float]:
    for value in values:
        if type(value) in (tuple, list):
            yield from _numbers_among(value)
        elif type(value) in (int, float) and value == value:
            yield value


def _between(x: float, bounds: list[float]) -> tuple[int, int]:
    if x != x:
        return -1, -1
    return bisect_left(bounds, x), bisect_right(bounds, x)


def _numbers_in(held: Iterable[tuple[Place, Any]]) -> Iterator[tuple[Place, float]]:
    for place, value in held:
        number = _number(value)
        if number is not None:
            yield place, number
        elif isinstance(value, dict):
            yield from _numbers_in(((*place, key), item) for key, item in value.items())


def _values(optimizer: Optimizer) -> list[Any]:
    groups = (group.values() for group in optimizer.param_groups)
    return [*chain.from_iterable(groups), *optimizer.__dict__.values()]


def _entries(optimizer: Optimizer) -> list[tuple[Tensor, Entry]]:
    """The parameters that are trained, with their entries."""
    state = optimizer.__dict__["state"]
    params = (p for group in optimizer.param_groups for p in group["params"])
    entries = ((p, state.get(p)) for p in params if p.requires_grad)
    return [(p, entry if isinstance(entry, dict) else {}) for p, entry in entries]


def _numbers_of_state(optimizer: Optimizer) -> list[tuple[Place, float]]:
    return list(
        _numbers_in(
            (("state", key), value)
            for p, entry in _entries(optimizer)
            for key, value in entry.items()
            if not _is_for_elements(value, p)
        )
    )


def _is_for_elements(value: Any, p: Tensor) -> bool:
    """Whether it is a number an element: a parameter with one element has one, too."""
    return isinstance(value, Tensor) and value.dim() != 0 and value.shape == p.shape
