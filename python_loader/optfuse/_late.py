# SPDX-License-Identifier: BSD-3-Clause
"""Values that updates of backward mode have used of an optimizer's state and attributes since its
last step(), for what a script changes between backward() and step(): the library's ledger asks here
where it finds other objects than before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optfuse._bits import difference
from optfuse._library.bindings import guard

Entry = dict[Any, Any]
Path = tuple[Any, ...]  # keys of dicts in dicts
_SCALE = ("grad_scale", "found_inf")


class Used:
    """The values that updates of one optimizer have used since its last step()."""

    def __init__(self) -> None:
        # Entries made or run through since then, and the versions of their tensors if these are
        # not known in C; by slots.
        self.made: dict[int, tuple[dict[Path, Any], list[int] | None]] = {}
        self._scale: list[tuple[Any, int]] = []

    def begin(self, optimizer: Optimizer) -> None:
        """A backward pass begins, or the library has been told of all anew."""
        self.made = {}
        self._scale = _scale_of(optimizer)

    def make(self, slot: int, entry: Entry, is_over: bool) -> None:
        """An entry was made or run through. is_over: by the update itself, not for it."""
        self.made[slot] = dict(_paths(entry)), _versions(entry) if is_over else None

    def changed_scale(self, optimizer: Optimizer) -> str | None:
        """The name of the attribute, if a loss scale or an overflow flag has changed."""
        if not guard("late_scale"):
            return None
        absent = [(None, 0)] * len(_SCALE)
        then = self._scale or absent
        for name, (a, version), (b, now) in zip(_SCALE, then, _scale_of(optimizer), strict=True):
            if _is_changed(a, b) or version != now:
                return name
        return None

    def changed_entry(
        self, slot: int, then: Entry, now: Entry, keys: tuple[str, ...] | None
    ) -> str | None:
        """A sentence with a gap for the parameter's label. then: the entry that updates used, if
        they did not make it. keys: of an entry, that an update uses; None: all."""
        used, versions = self.made.get(slot) or (dict(_paths(then)), None)
        now = dict(_paths(now))
        for path in {**used, **now} if keys is None else ((key,) for key in keys):
            if (path in used) != (path in now) or _is_changed(used.get(path), now.get(path)):
                how = "removed" if path not in now else "replaced" if path in used else "added"
                place = "".join(f"[{key!r}]" for key in path)
                return f"state{place} of {{}} was {how}"
        if versions is not None and versions != _versions(now):
            return "the state of {} was written in place"
        return None


def _paths(entry: Entry, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The leaves of dicts in dicts, with the keys that lead there."""
    for key, value in entry.items():
        if isinstance(value, dict):
            yield from _paths(value, (*at, key))
        else:
            yield (*at, key), value


def _is_changed(then: Any, now: Any) -> bool:
    """Tensors are told by identity, numbers and the like by value."""
    if then is now:
        return False
    return isinstance(then, Tensor) or difference("", now, then) is not None


def _scale_of(optimizer: Optimizer) -> list[tuple[Any, int]]:
    found = [optimizer.__dict__.get(name) for name in _SCALE]
    return [(value, value._version if isinstance(value, Tensor) else 0) for value in found]


def _versions(entry: Entry) -> list[int]:
    return [x._version for x in tensors_in(entry.values()) if not x.is_inference()]


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among the values, and in their containers."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from tensors_in(value.values())
        elif isinstance(value, list | tuple | deque):
            yield from tensors_in(value)
