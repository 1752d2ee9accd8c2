# SPDX-License-Identifier: BSD-3-Clause
"""Backward mode of a class without kernels: its own step() runs at the first complete gradient of a
backward pass, if it can, and what it records of a parameter runs when that one's gradient is there
(shim/recorded/ahead.h). Else backward() leaves all to step()."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._library.bindings import Error, lib, lib_with_gil
from optfuse._options import LINK
from optfuse._patches.profiling import has_hooks
from optfuse._rules import ROWS, Group, Rule
from optfuse._trials.compare import difference
from optfuse._updaters.slots import Groups, Slots
from optfuse._updaters.updater import CHANGED_GROUPS, Entry, OfPlan, Updater

_NOT_OPTIONS = ("params", "param_names")
_NOT_SETTINGS = (
    *("param_groups", "state", "step", LINK, "_step_supports_amp_scaling"),
    *("_opt_called", "_step_count", "_warned_capturable_if_run_uncaptured"),
)
_FORWARD = 'use optfuse.fuse(optimizer, mode="forward")'
_LATE = (
    "optfuse: {} was changed between backward() and step(), but backward fusion has called the "
    "class's own step() at the first gradient, with the old value; change it before backward() or "
    f"after step(), or {_FORWARD}"
)
_UNEXPECTED = (
    "optfuse: backward fusion has called the class's own step() at the first gradient of a backward "
    "pass, as if the same parameters got one as in the step before; but {} {}. Its update is left "
    f"out, the others are made, and the next step() confirms them. {_FORWARD[0].upper()}"
    f"{_FORWARD[1:]}, or run backward() to its end before step()"
)
_CALLED = (
    "optfuse: step() got {}, but backward fusion has called it already, without, at the first "
    f"gradient; {_FORWARD}"
)
_KEEPS = "keeps a gradient"
_KEPT = (
    f"optfuse: this step() {_KEEPS}, which the steps before did not; backward fusion has called it "
    f"before all gradients are there. Nothing was updated; {_FORWARD}"
)


def _count_references() -> tuple[int, int]:
    """Of a gradient that only its parameter has, and of one that is in a list, too."""
    param = torch.nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    alone = sys.getrefcount(param.grad)
    tensors = [param.grad]
    return alone, sys.getrefcount(tensors[0])


_ALONE, _IN_A_LIST = _count_references()


@dataclass(frozen=True)
class RecordedRule(Rule):
    """Options, state and formula are those of the class's own step()."""

    def hyper(self, group: Group) -> tuple[float, ...]:
        return ()

    def difference(self, group: Group) -> str:
        return ""


RECORDED = RecordedRule("own", **ROWS["own"], reference="own step()")


class Recorded(Updater):
    """By the class's own step(), once for all parameters."""

    may_share_state = True  # lines that have to do with two parameters are left to step()

    def __init__(self, of_plan: OfPlan) -> None:
        super().__init__(of_plan)
        self._run: Run | None = None  # begun, and not confirmed by step()
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # of step(), while it runs
        self._result: Any = None
        self._complained = False
        self._told: tuple[Slots | None, list[Tensor]] = (None, [])

    def explained(self, label: Callable[[int], str]) -> str:
        why = torch.ops.optfuse.why_not_ahead(self._plan)
        left = f"; backward() leaves all to it, since it {why}" if why else ""
        return f"own step(), whose operators are recorded{left}"

    def tried_on_cpu(self) -> int:
        return 0

    def is_tried(self) -> bool:
        return False

    def is_unconfirmed(self) -> bool:
        return self._run is not None or super().is_unconfirmed()

    def clear(self, optimizer: Optimizer, params: list[Tensor]) -> None:
        if self._run is not None:
            raise Error(CHANGED_GROUPS)

    def layout(self, groups: Groups) -> None:
        """Nothing is known by slot here."""

    def knows_state(self, optimizer: Optimizer, slots: Slots) -> bool:
        state = _flat(optimizer) if self._run is None else self._run.state
        known, self._told = self._told, (slots, [x for x in state if isinstance(x, Tensor)])
        return known[0] is slots and _are_same(known[1], self._told[1])

    def tell_entry(
        self, slots: Slots, slot: int, entry: Entry | None, fresh: bool, flushed: bool
    ) -> bool:
        if self._run is not None:  # what it has made has no numbers yet
            entry = self._run.entry_before(slots.params[slot])
        values = entry.values() if isinstance(entry, dict) else ()
        tensors = tuple(value for value in values if isinstance(value, Tensor))
        if slots.states[slot] is None or not _are_same(slots.states[slot], tensors):
            torch.ops.optfuse.set_state(slots.plan, slot, tensors, None, False)
            slots.states[slot] = tensors
        return flushed

    # ---- a step

    def called(
        self, optimizer: Optimizer, make: Callable[[], object], *args: Any, **kwargs: Any
    ) -> Any:
        """step(*args, **kwargs). make: has the library begin a step."""
        self._call, self._result = (args, kwargs), None
        try:
            make()
            return self._result
        finally:
            self._call = self._result = None

    def begin(
        self, optimizer: Optimizer, slots: Slots, in_backward: bool, same_state: bool
    ) -> bool:
        if in_backward:
            return self._begin_ahead(optimizer, slots)
        if self._run is None:
            return False
        if not self._complained:
            self._check(optimizer, slots, self._run, same_state)
        self._result = self._run.result
        return True

    def take_step(self, optimizer: Optimizer) -> None:
        args, kwargs = self._call or ((), {})
        with _as_stock(optimizer, self._stock):
            self._result = lib_with_gil.of_shim_recorded_step(
                self._plan, self._stock.step, (optimizer, *args), kwargs
            )
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if any(sys.getrefcount(p.grad) > _ALONE for p in params if p.grad is not None):
            torch.ops.optfuse.leave_to_step(self._plan, _KEEPS)

    def end(self, optimizer: Optimizer, slots: Slots, done: bool) -> None:
        if done and self._run is not None:
            self._end()

    def give_up(self, optimizer: Optimizer) -> None:
        """step() has run ahead, and its updates are not wanted. Raises optfuse.Error if one has been
        made."""
        if self._run is None or lib.of_shim_unconfirmed(self._plan):
            return
        self._run.put_back(optimizer, self._plan)
        self._end()

    def _end(self) -> None:
        self._run, self._complained = None, False
        torch.ops.optfuse.end_ahead(self._plan)

    def _begin_ahead(self, optimizer: Optimizer, slots: Slots) -> bool:
        if self._run is not None or self._call is not None or has_hooks(optimizer):
            return False
        gradients = torch.ops.optfuse.begin_ahead(self._plan)
        if not gradients:
            return False
        self._run = run = Run(optimizer)
        params = [p for p, g in zip(slots.params, gradients, strict=True) if g is not None]
        gradients = [g for g in gradients if g is not None]
        try:
            with _as_stock(optimizer, self._stock):
                run.result = lib_with_gil.of_shim_step_ahead(
                    *(self._plan, self._stock.step, (optimizer,)), *(params, gradients)
                )
            for i in range(len(gradients)):
                if sys.getrefcount(gradients[i]) > _IN_A_LIST:
                    raise Error(_KEPT)
        except BaseException:
            run.put_back(optimizer, self._plan)
            self._end()
            raise
        run.note(optimizer)
        return True

    def _check(self, optimizer: Optimizer, slots: Slots, run: Run, same_state: bool) -> None:
        """Raises optfuse.Error if stock's step() would have done something else now."""
        assert self._call is not None
        args, kwargs = self._call
        if args or any(value is not None for value in kwargs.values()):
            raise Error(_CALLED.format("arguments"))
        if has_hooks(optimizer):
            raise Error(_CALLED.format("hooks that were registered since then"))
        changed = run.changed(optimizer) if same_state else "the state"
        self._complained = True
        if changed is not None:
            raise Error(_LATE.format(changed))
        unexpected = torch.ops.optfuse.unexpected(self._plan)
        for slot in unexpected:
            run.put_back_entry(optimizer, slots.params[slot], self._plan)
        if unexpected:
            first = slots.params[unexpected[0]]
            how = "got none" if first.grad is None else "got one that it had not in the step before"
            raise Error(_UNEXPECTED.format(slots.labels[unexpected[0]], how))


class Run:
    """A step() that has run ahead of its gradients: what there was before, and after it."""

    result: Any = None
    _entries: dict[int, Any] | None = None

    def __init__(self, optimizer: Optimizer) -> None:
        self.state = _flat(optimizer)
        self._options = [(group, dict(group)) for group in optimizer.param_groups]
        self._attributes = dict(optimizer.__dict__)

    def note(self, optimizer: Optimizer) -> None:
        """step() has run."""
        self._after = _settings(optimizer)

    def entries(self) -> Iterator[tuple[Any, Any, Any]]:
        """Of the state before: a key, its entry, and what was in that if it is a dict."""
        i = 0
        while i < len(self.state):
            key, entry, n = self.state[i : i + 3]
            names, values = self.state[i + 3 : i + 3 + n], self.state[i + 3 + n : i + 3 + 2 * n]
            yield key, entry, dict(zip(names, values, strict=True))
            i += 3 + 2 * n

    def entry_before(self, param: Tensor) -> Any:
        if self._entries is None:
            self._entries = {id(key): items for key, _, items in self.entries()}
        return self._entries.get(id(param))

    def changed(self, optimizer: Optimizer) -> str | None:
        """The first setting that is not as step() has left it."""
        now, then = _settings(optimizer), self._after
        for name in {**then, **now}:
            missing = (name in now) != (name in then)
            if missing or difference("", then[name], now[name]) is not None:
                return name
        return None

    def put_back(self, optimizer: Optimizer, plan: int) -> None:
        own = optimizer.__dict__
        for key in [key for key in own if key not in self._attributes]:
            del own[key]
        own.update(self._attributes)
        for group, before in self._options:
            group.clear()
            group.update(before)
        own["state"].clear()
        for key, entry, items in self.entries():
            own["state"][key] = _put_back(entry, items, plan)

    def put_back_entry(self, optimizer: Optimizer, param: Tensor, plan: int) -> None:
        state = optimizer.__dict__["state"]
        before = [(entry, items) for key, entry, items in self.entries() if key is param]
        if not before:
            state.pop(param, None)
        for entry, items in before:
            state[param] = _put_back(entry, items, plan)


def _flat(optimizer: Optimizer) -> list[Any]:
    """The state in one list, since many small ones would have Python's collector of cycles look at
    all objects: key, entry, and the number of its items, their keys and values."""
    flat: list[Any] = []
    for key, entry in optimizer.__dict__["state"].items():
        is_dict = isinstance(entry, dict)
        flat += key, entry, len(entry) if is_dict else 0
        if is_dict:
            flat += entry
            flat += entry.values()
    return flat


def _are_same(known: Sequence[Any], found: Sequence[Any]) -> bool:
    return len(known) == len(found) and all(map(is_, known, found))


def _put_back(entry: Any, items: dict[Any, Any], plan: int) -> Any:
    if isinstance(entry, dict):
        entry.clear()
        entry.update(items)
        tensors = [item for item in items.values() if isinstance(item, Tensor)]
        torch.ops.optfuse.put_back(plan, tensors)
    return entry


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """What step() may have read beside state, as it is now."""
    options = {
        f"the option {name!r} of group {i}": _noted(value)
        for i, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in _NOT_OPTIONS
    }
    attributes = {
        f"the attribute {name!r}": _noted(value)
        for name, value in optimizer.__dict__.items()
        if name not in _NOT_SETTINGS
    }
    return options | attributes


def _noted(value: Any) -> Any:
    """Numbers can't change, and other objects are told by their identity; small tensors by what is in
    them, since a write through .data leaves their version as it is."""
    if isinstance(value, Tensor):
        is_small = value.device.type == "cpu" and value.numel() <= 1024
        return value.detach().clone() if is_small else (id(value), value._version)
    if type(value) in (list, tuple):
        return type(value)(map(_noted, value))
    if isinstance(value, dict):
        return {key: _noted(item) for key, item in value.items()}
    return value


@contextlib.contextmanager
def _as_stock(optimizer: Optimizer, stock: type[Optimizer]) -> Iterator[None]:
    """step() sees an optimizer of its class."""
    fused = optimizer.__class__
    optimizer.__class__ = stock
    try:
        yield
    finally:
        optimizer.__class__ = fused
