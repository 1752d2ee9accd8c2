# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers without kernels: the class's own step() runs on one parameter, on a
twin of the optimizer that has nothing but this parameter. Where the library has a
native update, it comes here for what is unusual, and for the first one, which makes
the state.

An update that waits uses the options and the state entry of its own step(). The
library calls apply() under the lock of the plan."""

from __future__ import annotations

import operator
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._library.bindings import Error, lib
from optfuse._library.default_device import DefaultDevice
from optfuse._own_step import twin
from optfuse._own_step.noted import Noted
from optfuse._own_step.settings import Copies, Promise, Settings, fresh
from optfuse._own_step.twin import Entry, Group
from optfuse._trials.compare import difference

owns: dict[int, Own] = {}  # plan -> what its updates need, until it is freed
_thread = threading.local()
_CHANGED = (
    "it changed {!r} of the optimizer, as it did not when fuse() tried it; "
    "use the optimizer as it is"
)
_late: list[int] = []  # plans of optimizers that died during an update


def running() -> bool:
    """Whether this thread is in the middle of an update, and holds its plan's lock."""
    return getattr(_thread, "depth", 0) > 0


def interrupted() -> BaseException | None:
    """The exception of the last update that failed on this thread; once."""
    return _thread.__dict__.pop("error", None)


def free_plan(plan: int) -> None:
    """Frees the plan of an optimizer that is gone. Inside an update, which holds locks that this
    needs, it is done later."""
    _late.append(plan)
    _free_late()


def _free_late() -> None:
    while _late and not running():
        late = _late.pop()
        lib.of_shim_plan_free(late)
        owns.pop(late, None)


class Own:
    """The data that the updates of one plan need. Knows neither the optimizer nor its
    parameters, so that it keeps none of them alive."""

    def __init__(
        self,
        plan: int,
        stock: type[Optimizer],
        promise: Promise,
        entries: tuple[tuple[str, ...], ...] = (),
    ) -> None:
        self._plan = plan
        self._stock = stock
        self._twin = twin.Twin(stock)
        self.promise = promise
        self._native_entries = entries  # those that the library updates itself
        self._attributes: dict[str, Any] = {}
        self._options: list[Group] = []
        self._empty: list[tuple[str, Any]] = []  # lists and dicts in those with None only
        self.noted: Noted | None = None  # backward mode: of what updates use
        self._after = Settings({}, {})  # what a step makes of copies of those
        self._copies = Copies()
        self.default_device = DefaultDevice()  # of the thread that called step() last, or fuse()
        self.layout([])
        owns[plan] = self

    def layout(self, groups: list[Group]) -> None:
        """The library was told of all parameters from the start."""
        self._group_of = [i for i, group in enumerate(groups) for _ in group["params"]]
        n = len(self._group_of)
        self._entries: list[Entry | None] = [None] * n
        self._stepped = [False] * n  # so that its state is made, if it has any
        self._stateless = [False] * n  # its last step has made none
        self._replaced = [self.promise.replaces_state] * n  # tensors of the state are exchanged
        self._idle: list[list[Tensor]] = []
        self.changed = True  # the library must be told of state again

    def begin(self, optimizer: Optimizer, before_gradients: bool) -> None:
        """Takes over the options and attributes that updates use from here on. No update is
        pending now."""
        _free_late()
        self._attributes = fresh(twin.attributes_of(optimizer), self.promise.attributes)
        alone = [twin.options_alone(group, before_gradients) for group in optimizer.param_groups]
        self._options = [fresh(options, self.promise.options) for options in alone]
        holders = self._attributes, *self._options
        pairs = (pair for holder in holders for pair in holder.items())
        self._empty = [pair for pair in pairs if _has_only_none(pair[1])]
        self.noted = None
        if before_gradients:
            self.note(optimizer)
        if self.promise.changes():
            self._after = self._without_gradients(optimizer)

    def note(self, optimizer: Optimizer) -> None:
        """Later changes of what updates use are told by this."""
        self.noted = Noted(optimizer, self._stock)

    def _without_gradients(self, optimizer: Optimizer) -> Settings:
        """The settings as this step leaves them where no parameter has a gradient."""
        groups, self._copies = optimizer.param_groups, Copies()
        self._idle = self._idle or [twin.without_gradient(group["params"]) for group in groups]
        changed = [
            {**options, **self._copies.of(group, self.promise.options), "params": list(idle)}
            for options, group, idle in zip(self._options, groups, self._idle, strict=True)
        ]
        of_attributes = self._copies.of_attributes(optimizer, self.promise.attributes)
        attributes = {**self._attributes, **of_attributes}
        other = twin.Twin(self._stock)  # that one may be in use
        after = other.step(attributes, changed, defaultdict(dict))
        return Settings(after, dict(enumerate(changed)))

    def advance(self, optimizer: Optimizer) -> None:
        """Options and attributes become what stock's step() makes of them. Updates go on
        with those of begin()."""
        self._copies.put_attributes(optimizer, self._after.attributes, self.promise.attributes)
        for name in self.promise.options:
            for i, group in enumerate(optimizer.param_groups):
                self._copies.put(group, self._after.options[i], name)

    def take_state(self, slot: int, entry: Entry | None) -> list[Tensor | None]:
        """The state of a slot, as the library's set_state() wants it."""
        self._entries[slot] = entry
        values = list(entry.values()) if entry else []
        if entry and self._native_entries:
            names = next((n for n in self._native_entries if entry.keys() == set(n)), None)
            values = [None, *values] if names is None else [entry[name] for name in names]
        tensors: list[Tensor | None] = [v for v in values if isinstance(v, Tensor)]
        is_known = bool(values) or self._stateless[slot]
        if not is_known or self._replaced[slot] or len(tensors) < len(values):
            tensors.append(None)
        return tensors

    def run(self, slot: int, param: Tensor) -> Entry | None:
        """The update; a state entry that it made, or None."""
        with self.default_device.here():
            return self._run(slot, param)

    def _run(self, slot: int, param: Tensor) -> Entry | None:
        entry = self._entries[slot]
        before = list(entry.values()) if entry else []
        group = self._group_of[slot]
        options = fresh(self._options[group], self.promise.options)
        attributes = fresh(self._attributes, self.promise.attributes)
        done = self._twin.step_alone(attributes, options, param, entry)
        made, *after = done
        if not all(map(_are_kept, (attributes, options), after, (2, 1))):
            self._refuse_changes(group, Settings(after[0], {group: after[1]}))
        for name, value in self._empty:
            if not _has_only_none(value):
                raise Error(_CHANGED.format(name))
        after = list(made.values()) if made else []
        if before and not _same(before, after):
            self.changed |= not self._replaced[slot]
            self._replaced[slot] = True
        self.changed |= not self._stepped[slot] or made is not entry
        self._stepped[slot] = True
        self._stateless[slot] = not made
        self._entries[slot] = made
        return made if made is not entry else None

    def _refuse_changes(self, group: int, after: Settings) -> None:
        """Raises optfuse.Error for a change that the trial has not found."""
        known = self._after
        attributes = twin.own_attributes(after.attributes)
        options = twin.own_options(after.options[group])
        expected = known.options.get(group, {})
        before = twin.own_attributes(self._attributes)
        places = [
            *_changed(before, attributes, known.attributes, self.promise.attributes),
            *_changed(self._options[group], options, expected, self.promise.options),
        ]
        if places:
            raise Error(_CHANGED.format(places[0]))


def _has_only_none(value: Any) -> bool:
    """Whether it is a container with places that are still to be filled."""
    if not isinstance(value, (list, dict, deque)) or not value:
        return False
    return all(x is None for x in (value.values() if isinstance(value, dict) else value))


def _are_kept(before: dict[str, Any], after: dict[str, Any], more: int) -> bool:
    """Whether a step() has left the values of a dict that it was given with more at its end."""
    same = len(after) == len(before) + more
    return same and all(map(operator.is_, before.values(), after.values()))


def _changed(
    before: dict[str, Any], after: dict[str, Any], expected: dict[str, Any], names: frozenset[str]
) -> Iterator[str]:
    for name in dict.fromkeys((*before, *after, *sorted(names))):
        then = expected if name in names else before
        missing = (name in after) != (name in then)
        if missing or difference("", after.get(name), then.get(name)) is not None:
            yield name


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        map(lambda x, y: x is y or (not isinstance(x, Tensor) and _equal(x, y)), a, b)
    )


def _equal(a: Any, b: Any) -> bool:
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:  # arrays and the like have no one answer
        return False


def apply(plan: int, slot: int, known: Tensor | None) -> Entry | None:
    """The work of the library's callback. known: the slot's parameter; None if the
    optimizer is being taken down. Returns a state entry that was made."""
    own = owns.get(plan)
    if own is None:
        raise Error("optfuse: this optimizer no longer exists")
    param = torch.ops.optfuse.parameter_of(plan, slot) if known is None else known
    _thread.depth = getattr(_thread, "depth", 0) + 1
    _thread.error = None
    try:
        return own.run(slot, param)
    except BaseException as error:
        _thread.error = error
        raise
    finally:
        _thread.depth -= 1
