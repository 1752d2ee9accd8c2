# SPDX-License-Identifier: BSD-3-Clause
"""Changes by a script between backward() and step() in backward mode, which stock's step() would
obey but come after the update: what the updates used is compared, parameter by parameter, with
what step() would use now."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from optfuse._library.bindings import Error, guard, lib
from optfuse._snapshot import Groups, State
from optfuse._trials.compare import difference

Entry = dict[Any, Any]
_LATE = (
    "optfuse: {} between backward() and step(), but backward fusion has already updated "
    'with the old value{}; do this after step(), or use optfuse.fuse(optimizer, mode="forward"). '
    "The update stands, and the next step() confirms it"
)
_SCALE = ("grad_scale", "found_inf")


class Holder(Protocol):
    """A fused optimizer's link."""

    def have_same_params(self, groups: Groups) -> bool: ...

    def changed_option(self, number: int, group: dict[str, Any]) -> str | None:
        """The first option in which a group differs from what updates of group `number` used."""

    def changed_attribute(self, optimizer: Optimizer) -> str | None: ...


@dataclass
class Told:
    """As much of an optimizer as updates use, as the library was told."""

    plan: int
    params: list[Tensor]  # of the slots
    labels: list[str]
    group_of: list[int]
    # A traced class: the updates that step() makes are of the programs of backward(), too, and
    # step() advances the counters of all.
    counts_together: bool
    reads_scale: bool  # the class has a use for grad_scale and found_inf
    state_keys: tuple[str, ...] | None  # of an entry, that an update uses; None: all

    def updated(self) -> Iterator[int]:
        for slot, param in enumerate(self.params):
            is_bound = self.counts_together and param.grad is not None
            if is_bound or lib.of_shim_is_updated(self.plan, slot):
                yield slot

    def written(self) -> Iterator[tuple[int, bool]]:
        """Slots whose parameter has been written since its update, or else (True) its state."""
        of_state = ctypes.c_bool()
        slot = lib.of_shim_written(self.plan, 0, ctypes.byref(of_state))
        while slot < len(self.params):
            yield slot, of_state.value
            slot = lib.of_shim_written(self.plan, slot + 1, ctypes.byref(of_state))


class Used:
    """The values that updates of one optimizer have used since its last step()."""

    def __init__(self) -> None:
        self.confirm()

    def confirm(self) -> None:
        """step() has taken place."""
        self.has_begun = False  # a backward pass that may update
        self._state: State | None = None
        # Entries made or run through since then, and the versions of their tensors if these are
        # not known in C; by the id of a parameter.
        self._made: dict[int, tuple[Entry, list[int] | None]] = {}
        self._inserted: list[Tensor] = []  # parameters whose entry is new in the state
        self._scale: list[tuple[Any, int]] = []
        self._kept: list[str] = []  # changes from before the library was told of all anew
        self._said: set[str] = set()  # changes that an error has named

    def begin(self, optimizer: Optimizer, state: State | None) -> None:
        """A backward pass begins, or the library has been told of all anew."""
        self.has_begun = True
        self._state = state
        self._made = {}
        self._scale = _scale_of(optimizer)

    def make(self, param: Tensor, entry: Entry, is_new: bool, is_over: bool) -> None:
        """An entry was made or run through. is_over: by the update itself, not for it."""
        self._made[id(param)] = dict(entry), _versions(entry) if is_over else None
        if is_new:
            self._inserted.append(param)

    def put_in_order(self, state: dict[Any, Any], slots: dict[int, int]) -> None:
        """Stock's step() would have inserted the new entries in the order of the parameters.
        slots: by the id of a parameter."""
        for param in sorted(self._inserted, key=lambda p: slots.get(id(p), -1)):
            if param in state:
                state[param] = state.pop(param)

    def has_changed(self) -> bool:
        """Whether an error has said so."""
        return bool(self._said)

    def keep_changes(self, told: Told, holder: Holder, optimizer: Optimizer) -> None:
        """Before the library is told of all anew."""
        self._kept = list(self._changes(told, holder, optimizer, same_groups=False))

    def refuse_changes(
        self, told: Told, holder: Holder, optimizer: Optimizer, same_groups: bool, at_step: bool
    ) -> None:
        """at_step: what this says, the next step() does not say again."""
        texts = list(dict.fromkeys(self._changes(told, holder, optimizer, same_groups)))
        new = [text for text in texts if text not in self._said]
        if not new:
            return
        if at_step:
            self._said.update(texts)
        more = f" (one of {len(new)} such changes)" if len(new) > 1 else ""
        raise Error(_LATE.format(new[0], more))

    def _changes(
        self, told: Told, holder: Holder, optimizer: Optimizer, same_groups: bool
    ) -> Iterator[str]:
        yield from self._kept
        name = holder.changed_attribute(optimizer)
        if name is not None:
            yield f"the optimizer's attribute {name!r}, which its step() may read, was changed"
        elif told.reads_scale and guard("late_scale"):
            name = self._changed_scale(optimizer)
            if name is not None:
                user = told.labels[next(told.updated(), 0)]
                yield f"the optimizer's attribute {name!r}, which {user} depends on, was changed"
        if not same_groups:
            yield from _changed_groups(told, holder, optimizer.param_groups)
        yield from self._changed_state(told, optimizer.__dict__["state"])
        for slot, of_state in told.written():
            what = "the state of " if of_state else ""
            yield f"{what}{told.labels[slot]} was written in place"

    def _changed_scale(self, optimizer: Optimizer) -> str | None:
        for name, then, now in zip(_SCALE, self._scale, _scale_of(optimizer), strict=False):
            if _is_changed(then[0], now[0]) or then[1] != now[1]:
                return name
        return None

    def _changed_state(self, told: Told, state: dict[Any, Any]) -> Iterator[str]:
        if (
            self._state is None
            or not guard("late_state")
            or (not self._made and self._state.is_same(state))
        ):
            return
        entries = self._state.entries()
        for slot in told.updated():
            param = told.params[slot]
            then, versions = self._made.get(id(param)) or (entries.get(id(param), {}), None)
            now = state.get(param, {})
            change = _change_of(then, now, told.state_keys)
            if change is not None:
                yield change.format(told.labels[slot])
            elif versions is not None and versions != _versions(now):
                yield f"the state of {told.labels[slot]} was written in place"


def _changed_groups(told: Told, holder: Holder, groups: Groups) -> Iterator[str]:
    same_params = holder.have_same_params(groups)
    if same_params and not any(map(holder.changed_option, range(len(groups)), groups)):
        return
    if told.counts_together and not same_params:
        yield f"param_groups, with which {told.labels[next(told.updated(), 0)]} counts, was changed"
        return
    place = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
    changed: dict[tuple[int, int], str | None] = {}
    for slot in told.updated():
        now = place.get(id(told.params[slot]))
        if now is None and guard("late_groups"):
            yield f"{told.labels[slot]} was taken out of param_groups"
        if now is None:
            continue
        pair = told.group_of[slot], now
        if pair not in changed:
            changed[pair] = holder.changed_option(pair[0], groups[now])
        if changed[pair] is not None:
            yield f"the option {changed[pair]!r} of {told.labels[slot]} was changed"


def _change_of(then: Entry, now: Entry, keys: tuple[str, ...] | None) -> str | None:
    """With a gap for the parameter's label."""
    for key in {**then, **now} if keys is None else keys:
        if (key in then) != (key in now) or _is_changed(then.get(key), now.get(key)):
            how = "removed" if key not in now else "replaced" if key in then else "added"
            return f"state[{key!r}] of {{}} was {how}"
    return None


def _is_changed(then: Any, now: Any) -> bool:
    """Tensors are told by identity, numbers and the like by value."""
    if then is now:
        return False
    return isinstance(then, Tensor) or difference("", now, then) is not None


def _scale_of(optimizer: Optimizer) -> list[tuple[Any, int]]:
    found = [optimizer.__dict__.get(name) for name in _SCALE]
    return [(value, value._version if isinstance(value, Tensor) else 0) for value in found]


def _versions(entry: Entry) -> list[int]:
    return [x._version for x in entry.values() if isinstance(x, Tensor) and not x.is_inference()]
