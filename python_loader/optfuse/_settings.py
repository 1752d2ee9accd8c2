# SPDX-License-Identifier: BSD-3-Clause
"""What a class's step() changes beside parameters and state: attributes of the optimizer
and options of its groups."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from optfuse._twin import Group
from optfuse._values import deep_copy, difference

SETTINGS = "the optimizer's options or attributes"


@dataclass(frozen=True)
class Promise:
    """What a class's step() does beside updating parameters one by one, as a trial found."""

    replaces_state: bool = False  # puts new tensors into the state
    # Names of what it changes, in the same way for all parameters, also where none has a
    # gradient.
    options: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()

    def changes(self) -> bool:
        """Options or attributes."""
        return bool(self.options or self.attributes)

    def __or__(self, other: Promise) -> Promise:
        return Promise(
            self.replaces_state or other.replaces_state,
            self.options | other.options,
            self.attributes | other.attributes,
        )


@dataclass(frozen=True)
class Settings:
    """Attributes of an optimizer and options of its groups, by their index."""

    attributes: dict[str, Any]
    options: dict[int, Group]


@dataclass(frozen=True)
class Change:
    """Of an attribute, or of an option of a group."""

    name: str
    group: int | None = None

    def __str__(self) -> str:
        if self.group is None:
            return f"the optimizer's attribute {self.name!r}"
        return f"the option {self.name!r} of group {self.group}"


def changes(before: Settings, after: Settings) -> Iterator[Change]:
    """What is not the same, in the groups that `after` has."""
    yield from map(Change, _differing(before.attributes, after.attributes))
    for i, options in after.options.items():
        for name in _differing(before.options[i], options):
            yield Change(name, i)


def _differing(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    for name in {**a, **b}:
        missing = (name in a) != (name in b)
        if missing or difference("", a.get(name), b.get(name)) is not None:
            yield name


def copied_settings(settings: Settings) -> Settings:
    both = deep_copy((settings.attributes, settings.options), SETTINGS)
    return Settings(*both)


def fresh(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """With copies of what a step may change in place."""
    copies = {name: copy.deepcopy(values[name]) for name in names if name in values}
    return {**values, **copies} if copies else values


def put(into: dict[str, Any], values: dict[str, Any], name: str) -> None:
    if name in values:
        into[name] = copy.deepcopy(values[name])
    else:
        into.pop(name, None)
