# SPDX-License-Identifier: BSD-3-Clause
"""Classes that treat parameters one by one only once a group is set up: a first step makes options
from all parameters, or ends early for all of them where one has no state yet. Such a class may
count the steps of a group among its options, and put the counter into the state of the first
parameter with a gradient, too.

A group is steady if its options and the kinds of its state entries are those that a trial has found
after the first steps. Steps of other groups are the class's own, of all parameters at once."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optfuse._own_step.reach import Memory, reachable
from optfuse._own_step.twin import HIDDEN, Entry, Group, own_options, unbound

Path = tuple[Any, ...]  # keys of dicts in dicts
_ABSENT = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None), set, frozenset)


@dataclass(frozen=True)
class Steady:
    """The looks of a steady group, and the ways of its steps."""

    options: frozenset[str]  # that a group has
    entries: frozenset[Any]  # kinds of its state entries
    counters: tuple[tuple[Path, str], ...]  # in the first entry, and the option that each one is
    maps: frozenset[str]  # attributes, dicts by parameter that step() fills for itself
    drops_gradients: bool  # .grad is None afterwards

    def __or__(self, other: Steady | None) -> Steady:
        """The looks that fit two runs of a trial."""
        if other is None:
            return self
        return replace(
            self,
            options=self.options & other.options,
            entries=self.entries | other.entries,
            counters=tuple({**dict(other.counters), **dict(self.counters)}.items()),
            maps=self.maps | other.maps,
        )


# ---- entries


def kind_of(entry: Any, but: Container[Path], at: Path = ()) -> Any:
    """The kind of a state entry: its keys and its numbers, flags and texts; of all else the types.
    A dict by numbers has a place for each part of a parameter. but: paths that don't count."""
    if isinstance(entry, dict):
        kinds = (
            (key, kind_of(value, but, (*at, key)))
            for key, value in entry.items()
            if (*at, key) not in but
        )
        if entry and all(type(key) is int for key in entry):
            return frozenset(kind for _, kind in kinds)
        return frozenset(kinds)
    if isinstance(entry, _PLAIN):
        return type(entry), frozenset(entry) if isinstance(entry, set) else entry
    return type(entry)


def paths(entry: Any, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The leaves of dicts in dicts, with the keys that lead there."""
    for key, value in entry.items():
        if isinstance(value, dict):
            yield from paths(value, (*at, key))
        else:
            yield (*at, key), value


def _dict_at(entry: Entry, path: Path) -> dict[Any, Any]:
    for key in path[:-1]:
        entry = entry.setdefault(key, {})
    return entry


def counters_in(entry: Entry, steady: Steady) -> list[Any]:
    return [_dict_at(entry, path).get(path[-1], _ABSENT) for path, _ in steady.counters]


def put_counters(entry: Entry, steady: Steady, values: Iterable[Any]) -> None:
    """Puts back the values that counters_in() has found."""
    for (path, _), value in zip(steady.counters, values, strict=True):
        place = _dict_at(entry, path)
        if value is _ABSENT:
            place.pop(path[-1], None)
        else:
            place[path[-1]] = value


def count(entry: Entry, steady: Steady, options: Group) -> None:
    """The entry of a group's first parameter with a gradient gets the group's counters."""
    put_counters(entry, steady, [options[name] for _, name in steady.counters])


# ---- groups


def why_unsteady(optimizer: Optimizer, steady: Steady) -> str | None:
    """Why the class's own step() has to take a step of all parameters; None: it need not."""
    state = optimizer.__dict__["state"]
    but = frozenset(path for path, _ in steady.counters)
    for number, group in enumerate(optimizer.param_groups):
        missing = steady.options - own_options(group).keys()
        if missing:
            return f"group {number} has no option {min(missing)!r} yet"
        # Frozen ones, too: the class may wait until all have state.
        entries = [state.get(p) for p in group["params"]]
        if not all(isinstance(entry, dict) and entry for entry in entries):
            return f"a parameter of group {number} has no state yet"
        if not {kind_of(entry, but) for entry in entries} <= steady.entries:
            return f"the state of group {number} is not of a kind that was tried"
    return None


# ---- attributes by parameter


def maps_of_parameters(optimizer: Optimizer) -> frozenset[str]:
    """The attributes with dicts that lead from or to parameters."""
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return frozenset(
        name
        for name, value in unbound(optimizer.__dict__, optimizer).items()
        if type(value) is dict and name not in HIDDEN
        if any(isinstance(x, Tensor) and id(x) in ids for x in reachable(value))
    )


def why_no_maps(
    optimizer: Optimizer, names: Iterable[str], filled: Iterable[Container[str]]
) -> str | None:
    """Why copies, which begin with empty dicts, may go another way. filled: the names of those that
    steps on copies have filled."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    memory = [Memory([p]) for p in params]
    for name in names:
        for item in optimizer.__dict__.get(name, {}).items():
            if not all(name in some for some in filled):
                return f"its attribute {name!r} holds parameters, outside of param_groups"
            tensors = [x for x in reachable(*item) if isinstance(x, Tensor)]
            owners = {i for x in tensors for i, p in enumerate(params) if memory[i].has(x)}
            if len(owners) != 1 or not all(memory[i].has(x) for x in tensors for i in owners):
                return f"its attribute {name!r} leads from one parameter to another"
    return None
