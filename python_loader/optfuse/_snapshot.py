# SPDX-License-Identifier: BSD-3-Clause
"""What the library has been told of an optimizer's param_groups and state, to find out
quickly that all of it is still there: by the identity of objects, in C."""

from __future__ import annotations

from itertools import chain
from operator import itemgetter
from typing import Any

from torch import Tensor

from optfuse._native import lib_with_gil

Groups = list[dict[str, Any]]

params_of = itemgetter("params")
_CONSTANT = {bool, int, float, complex, str, type(None)}


class GroupsSnapshot:
    """Parameters and options."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._items: list[Tensor | None] = []  # not those of any groups
        self.forget_options()

    def forget_options(self) -> None:
        self._lists: list[Any] = []
        self._entries: list[list[Any]] = []

    def remember_params(self, groups: Groups) -> None:
        self._items = [item for group in groups for item in (*group["params"], None)]

    def remember(self, groups: Groups) -> None:
        """With the parameters that are remembered. Groups that could become others without
        another object in them are never found the same."""
        self._lists = list(map(params_of, groups))
        self._entries = [
            list(chain.from_iterable(group.items())) if _is_constant(group) else []
            for group in groups
        ]

    def have_same_params(self, groups: Groups) -> bool:
        lists = [p if type(p) is list else list(p) for p in map(params_of, groups)]
        return lib_with_gil.of_shim_same_items(lists, self._items)

    def are_same(self, groups: Groups) -> bool:
        """False may also mean that this can't be told quickly."""
        return type(groups) is list and lib_with_gil.of_shim_same_groups(
            groups, self._entries, self._lists, self._items
        )


def _is_constant(group: dict[str, Any]) -> bool:
    return type(group["params"]) is list and all(map(_is_constant_entry, group, group.values()))


def _is_constant_entry(name: str, value: Any) -> bool:
    kind = type(value)
    if kind is tuple:
        return _CONSTANT.issuperset(map(type, value))
    return kind in _CONSTANT or name in ("params", "param_names")


class StateSnapshot:
    """The state's entries, and what is in them."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._keys: list[Any] = []
        self._entries: list[Any] = []
        self._values: list[Any] = [None]  # never equal to what is there

    def is_empty(self) -> bool:
        return not self._keys

    def remember(self, state: dict[Any, Any]) -> None:
        self._keys = list(state)
        self._entries = list(state.values())
        # Under other keys than parameters there may be anything, as in stock.
        entries = (entry for entry in self._entries if isinstance(entry, dict))
        self._values = list(chain.from_iterable(map(dict.values, entries)))

    def is_same(self, state: dict[Any, Any]) -> bool:
        return lib_with_gil.of_shim_same_state(state, self._keys, self._entries, self._values)
