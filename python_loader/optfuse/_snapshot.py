# SPDX-License-Identifier: BSD-3-Clause
"""What the library has been told of an optimizer's param_groups and state, to find out
quickly that all of it is still there: by the identity of objects, in C."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import chain
from operator import itemgetter
from typing import Any

from optfuse._library.bindings import lib_with_gil

Groups = list[dict[str, Any]]

params_of = itemgetter("params")
_CONSTANT = {bool, int, float, complex, str, type(None)}
_END = object()  # of what one list or dict has


class _Objects:
    """Objects, kept alive, and the array in which C reads their addresses."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self.kept = list(objects)
        self._addresses = array("Q", [0 if x is _END else id(x) for x in self.kept])
        self.array = self._addresses.buffer_info()  # its address, and how many


_NONE = _Objects((object(),))  # never the same as what is there


class GroupsSnapshot:
    """Parameters and options."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._items = _NONE
        self.forget_options()

    def forget_options(self) -> None:
        self._lists: list[Any] = []
        self._entries = _NONE

    def remember_params(self, groups: Groups) -> None:
        self._items = _Objects(item for group in groups for item in (*group["params"], _END))

    def remember(self, groups: Groups) -> None:
        """With the parameters that are remembered. Groups that could become others without
        another object in them are never found the same."""
        self._lists = list(map(params_of, groups))
        constant = [group if _is_constant(group) else {} for group in groups]
        self._entries = _Objects(chain.from_iterable(map(_items, constant)))

    def have_same_params(self, groups: Groups) -> bool:
        lists = [p if type(p) is list else list(p) for p in map(params_of, groups)]
        return lib_with_gil.of_shim_same_items(lists, *self._items.array)

    def are_same(self, groups: Groups) -> bool:
        """False may also mean that this can't be told quickly."""
        return type(groups) is list and lib_with_gil.of_shim_same_groups(
            groups, *self._entries.array, self._lists, *self._items.array
        )


def _items(of_one: dict[Any, Any]) -> tuple[Any, ...]:
    return (*chain.from_iterable(of_one.items()), _END)


def _is_constant(group: dict[str, Any]) -> bool:
    return type(group["params"]) is list and all(map(_is_constant_entry, group, group.values()))


def _is_constant_entry(name: str, value: Any) -> bool:
    kind = type(value)
    if kind is tuple:
        return _CONSTANT.issuperset(map(type, value))
    return kind in _CONSTANT or name in ("params", "param_names")


class State:
    """The state's entries, and what is in them, at one time."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self._entries = _Objects((*chain.from_iterable(state.items()), _END))
        # Under other keys than parameters there may be anything, as in stock.
        entries = [entry if isinstance(entry, dict) else {} for entry in state.values()]
        self._values = _Objects(chain.from_iterable(map(_items, entries)))

    def is_empty(self) -> bool:
        return len(self._entries.kept) == 1

    def is_same(self, state: dict[Any, Any]) -> bool:
        return lib_with_gil.of_shim_same_state(state, *self._entries.array, *self._values.array)

    def entries(self) -> dict[int, dict[Any, Any]]:
        """The keys and values that each had, by the id of its parameter."""
        parts, found = iter(self._values.kept), {}
        for key in self._entries.kept[:-1:2]:
            found[id(key)] = entry = {}
            while (name := next(parts)) is not _END:
                entry[name] = next(parts)
        return found


class StateSnapshot:
    """The state as the library was told of it."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.told: State | None = None

    def is_empty(self) -> bool:
        return self.told is None or self.told.is_empty()

    def remember(self, state: dict[Any, Any]) -> None:
        self.told = State(state)

    def is_same(self, state: dict[Any, Any]) -> bool:
        return self.told is not None and self.told.is_same(state)
