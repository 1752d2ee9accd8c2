# SPDX-License-Identifier: BSD-3-Clause
"""Changes that a class's step() makes beside parameters and state: attributes of the optimizer
and options of its groups."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._own_step.twin import CONSTANT, SHARED, Group, attributes_of, put_shared_state
from optfuse._trials.compare import deep_copy, difference, same_bits

SETTINGS = "the optimizer's options or attributes"


@dataclass(frozen=True)
class Promise:
    """The changes of a class's step() beside its updates of single parameters, as a trial found."""

    replaces_state: bool = False  # puts new tensors into the state
    # Names of what it changes, in the same way for all parameters, also where none has a
    # gradient.
    options: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    # Those whose objects it writes into, and the keys of such objects in the state.
    written: frozenset[tuple[str, Any]] = frozenset()

    def changes(self) -> bool:
        """Options or attributes."""
        return bool(self.options or self.attributes)

    def __or__(self, other: Promise) -> Promise:
        return Promise(
            self.replaces_state or other.replaces_state,
            self.options | other.options,
            self.attributes | other.attributes,
            self.written | other.written,
        )


@dataclass(frozen=True)
class Settings:
    """Attributes of an optimizer and options of its groups, by their index."""

    attributes: dict[str, Any]
    options: dict[int, Group]


@dataclass(frozen=True)
class Change:
    """A change of an attribute, or of an option of a group."""

    name: str
    group: int | None = None

    def __str__(self) -> str:
        if self.name == SHARED:
            return "state that belongs to no parameter"
        if self.group is None:
            return f"the optimizer's attribute {self.name!r}"
        return f"the option {self.name!r} of group {self.group}"


def changes(before: Settings, after: Settings) -> Iterator[Change]:
    """The changes between two settings, in the groups that `after` has."""
    yield from map(Change, differing(before.attributes, after.attributes))
    for i, options in after.options.items():
        for name in differing(before.options[i], options):
            yield Change(name, i)


def differing(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    """The names under which two dicts differ."""
    for name in {**a, **b}:
        missing = (name in a) != (name in b)
        if missing or difference("", a.get(name), b.get(name)) is not None:
            yield name


def copied_settings(settings: Settings) -> Settings:
    both = deep_copy((settings.attributes, settings.options), SETTINGS)
    return Settings(*both)


def fresh(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """With copies of what a step may change in place."""
    copies = {
        name: copy.deepcopy(values[name])
        for name in names
        if name in values and type(values[name]) not in CONSTANT
    }
    return {**values, **copies} if copies else values


class Copies:
    """Copies of options and attributes. Their changes come back into the objects that a step()
    writes into, which others may hold, too."""

    def __init__(self) -> None:
        self._real: dict[int, tuple[Any, Any]] = {}  # id of a copy -> it, and what it is of

    def of(self, values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
        made = {}
        for name in names:
            if name in values:
                value = made[name] = values[name]
                if type(value) not in CONSTANT:
                    made[name] = copy.deepcopy(value)
                    self._remember(made[name], value)
        return made

    def _remember(self, made: Any, real: Any) -> None:
        if made is real:
            return
        self._real[id(made)] = made, real
        if isinstance(made, dict):
            for key in made.keys() & real.keys():
                self._remember(made[key], real[key])
        elif isinstance(made, list | tuple | deque):
            for pair in zip(made, real, strict=True):
                self._remember(*pair)

    def put_attributes(
        self, optimizer: Optimizer, after: dict[str, Any], names: Iterable[str]
    ) -> None:
        """They become those of `after`."""
        for name in names:
            if name == SHARED:
                put_shared_state(optimizer, self._back(after.get(name, {})))
            else:
                self.put(optimizer.__dict__, after, name)

    def of_attributes(self, optimizer: Optimizer, names: Iterable[str]) -> dict[str, Any]:
        return self.of(attributes_of(optimizer), names) if names else {}

    def put(self, into: dict[str, Any], values: dict[str, Any], name: str) -> None:
        if name in values:
            into[name] = self._back(values[name])
        else:
            into.pop(name, None)

    def _back(self, value: Any) -> Any:
        real = self._real.get(id(value), (None, None))[1]
        if isinstance(value, Tensor):
            return copy.deepcopy(value) if real is None else _overwritten(real, value)
        if isinstance(value, dict):
            items = {key: self._back(item) for key, item in value.items()}
            if real is not None:
                real.clear()
                real.update(items)
        elif isinstance(value, list | deque):
            values = [self._back(item) for item in value]
            if real is not None:
                real.clear()
                real.extend(values)
        elif isinstance(value, set):
            if real is not None:
                real.clear()
                real.update(value)
        elif type(value) is tuple:
            return tuple(map(self._back, value))
        return copy.deepcopy(value) if real is None else real


def _overwritten(real: Tensor, value: Tensor) -> Tensor:
    if real.shape != value.shape or real.dtype != value.dtype:
        return value.detach().clone()
    if not same_bits(real, value):
        with torch.no_grad():
            real.copy_(value)
    return real
