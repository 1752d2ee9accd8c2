# SPDX-License-Identifier: BSD-3-Clause
"""Backward mode of a class without kernels: its own step() runs at the first complete gradient of a
backward pass, if it can, and what it records of a parameter runs when that one's gradient is there
(shim/recorded/ahead.h). Else backward() leaves all to step()."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._arguments.check import parameters_of
from optfuse._late import Settings, own_attributes, tensors_in
from optfuse._library.bindings import Error, guard, lib, lib_with_gil
from optfuse._library.default_device import DefaultDevice
from optfuse._patches.profiling import addresses_are_noted, has_hooks
from optfuse._updaters.shared_state import shares_with_others
from optfuse._updaters.slots import Groups, Slots
from optfuse._updaters.updater import CHANGED_GROUPS, OfPlan, Updater

_FORWARD = 'use optfuse.fuse(optimizer, mode="forward")'
_UNEXPECTED = (
    "optfuse: backward fusion has called the class's own step() at the first gradient of a "
    "backward pass, as if the same parameters got one as in the step before; but {} {}. Its update "
    f"is left out, the others are made, and the next step() confirms them. {_FORWARD[0].upper()}"
    f"{_FORWARD[1:]}, or run backward() to its end before step()"
)
_CALLED = (
    "optfuse: step() got {}, but backward fusion has called it already, without, at the first "
    f"gradient; {_FORWARD}"
)
_STEPPED_ONE = (
    "optfuse: step_parameter() of {}, but backward fusion has called the class's own step() at the "
    "first gradient of this pass, for all parameters; call step() behind backward(), or use "
    "optfuse.Backward(final=True)"
)
_KEEPS = "keeps a gradient"
_KEPT = (
    f"optfuse: this step() {_KEEPS}, which the steps before did not; backward fusion has called it "
    f"before all gradients are there. Nothing was updated; {_FORWARD}"
)


def _count_references() -> tuple[int, int]:
    """Those of a gradient that only its parameter has, and of one that is in a list, too."""
    param = torch.nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    alone = sys.getrefcount(param.grad)
    tensors = [param.grad]
    return alone, sys.getrefcount(tensors[0])


_ALONE, _IN_A_LIST = _count_references()


class Recorded(Updater):
    """By the class's own step(), once for all parameters."""

    def __init__(self, of_plan: OfPlan) -> None:
        super().__init__(of_plan)
        self._run: Run | None = None  # begun, and not confirmed by step()
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # of step(), while it runs
        self._result: Any = None
        self._complained = False
        self._default_device = DefaultDevice()  # of the last step() that was watched
        self._records = of_plan.options.recorded
        self.passes_ahead = 0  # backward passes at whose first gradient step() has run

    def why_left(self) -> str:
        """The reason for which the last pass was left to step(); or nothing."""
        why: str = torch.ops.optfuse.why_not_ahead(self._plan)
        return why

    def described(self) -> str:
        if not self._records:
            return "its step() is called as it is"
        why = self.why_left()
        left = f"; now backward() leaves all to it, since it {why}" if why else ""
        times = "once" if self.passes_ahead == 1 else f"{self.passes_ahead} times"
        return f"its step() ran {times} at the first gradient of backward(){left}"

    def explained(self, label: Callable[[int], str]) -> str:
        return f"own step(), whose operators are recorded: {self.described()}"

    def is_unconfirmed(self) -> bool:
        return self._run is not None or super().is_unconfirmed()

    def is_ahead(self, slot: int) -> bool:
        return super().is_unconfirmed()  # of any: their counters advance together

    def clear(self, optimizer: Optimizer) -> None:
        if super().is_unconfirmed():
            raise Error(CHANGED_GROUPS)
        self.give_up(optimizer)

    def layout(self, groups: Groups) -> None:
        torch.ops.optfuse.leave_to_step(self._plan, "has new parameters")

    def used(self) -> Settings | None:
        return None if self._run is None else self._run.used

    def changed_attribute(self, optimizer: Optimizer, slots: Slots) -> str:
        found = super().changed_attribute(optimizer, slots)
        written = not found and set(torch.ops.optfuse.written_numbers(self._plan))
        if not written:
            return found
        return f"the state{_owner_of(optimizer, slots, written)} was written in place"

    # ---- a step

    def step_one(self, optimizer: Optimizer, slots: Slots, slot: int) -> None:
        if self._run is not None:
            raise Error(_STEPPED_ONE.format(slots.labels[slot]))
        super().step_one(optimizer, slots, slot)

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

    def begin(self, optimizer: Optimizer, slots: Slots, in_backward: bool) -> bool:
        if in_backward:
            return self._begin_ahead(optimizer, slots)
        if self._run is None:
            return False
        if not self._complained:
            self._check(optimizer, slots, self._run)
        self._result = self._run.result
        return True

    def take_step(self, optimizer: Optimizer) -> None:
        args, kwargs = self._call or ((), {})
        self._default_device = DefaultDevice()
        step, args = self._own.method("step"), (optimizer, *args)
        with self._own.seen(optimizer):
            if not self._records or addresses_are_noted():  # which tensors without numbers lack
                self._result = step(*args, **kwargs)
                torch.ops.optfuse.leave_to_step(self._plan, "was not recorded")
                return
            self._result = lib_with_gil.of_shim_recorded_step(self._plan, step, args, kwargs)
        params = parameters_of(optimizer)
        if any(sys.getrefcount(p.grad) > _ALONE for p in params if p.grad is not None):
            torch.ops.optfuse.leave_to_step(self._plan, _KEEPS)

    def end(self, optimizer: Optimizer, slots: Slots, done: bool) -> None:
        if done and self._run is not None:
            torch.ops.optfuse.confirm_ahead(self._plan)
            self._run.show(optimizer)
            for param in self._run.dropped:
                param.grad = None
            self._end()

    def give_up(self, optimizer: Optimizer) -> None:
        if self._run is not None and not lib.of_shim_unconfirmed(self._plan):
            self._end()

    def _end(self) -> None:
        self._run, self._complained = None, False
        torch.ops.optfuse.end_ahead(self._plan)

    def _begin_ahead(self, optimizer: Optimizer, slots: Slots) -> bool:
        if self._run is not None:
            return torch.ops.optfuse.has_begun_here(self._plan)  # type: ignore[no-any-return]
        if self._call is not None or has_hooks(optimizer):
            return False
        if addresses_are_noted() or shares_with_others(optimizer):
            return False
        gradients = torch.ops.optfuse.begin_ahead(self._plan)
        if not gradients:
            return False
        self._run = run = Run(optimizer)
        params = [p for p, g in zip(slots.params, gradients, strict=True) if g is not None]
        gradients = [g for g in gradients if g is not None]
        try:
            with self._own.seen(optimizer), self._default_device.here():
                run.result = lib_with_gil.of_shim_step_ahead(
                    *(self._plan, self._own.method("step"), (optimizer,)),
                    *(params, gradients, run.dropped),
                )
            for i in range(len(gradients)):
                if sys.getrefcount(gradients[i]) > _IN_A_LIST:
                    raise Error(_KEPT)
        except BaseException:
            run.put_back(optimizer)
            self._end()
            raise
        self.passes_ahead += 1
        run.hide(optimizer, self._plan)
        return True

    def _check(self, optimizer: Optimizer, slots: Slots, run: Run) -> None:
        """Raises optfuse.Error if stock's step() would have done something else now."""
        assert self._call is not None
        args, kwargs = self._call
        if any(value is not None for value in (*args, *kwargs.values())):
            raise Error(_CALLED.format("arguments"))
        if has_hooks(optimizer):
            raise Error(_CALLED.format("hooks that were registered since then"))
        self._complained = True
        unexpected = torch.ops.optfuse.unexpected(self._plan)
        for slot in unexpected:
            run.leave_out(slots.params[slot])
        if unexpected and guard("ahead_unexpected"):
            first = slots.params[unexpected[0]]
            how = "got none" if first.grad is None else "got one that it had not in the step before"
            raise Error(_UNEXPECTED.format(slots.labels[unexpected[0]], how))


class Run:
    """A step() that has run ahead of its gradients. What it has made of state, options and
    attributes appears when step() is called."""

    result: Any = None

    def __init__(self, optimizer: Optimizer) -> None:
        self._before = _Snapshot(optimizer)
        settings = own_attributes(optimizer), optimizer.param_groups
        self._there = list(tensors_in(settings))  # others step() makes
        self.dropped: list[Tensor] = []  # parameters whose .grad step() has set to None

    def hide(self, optimizer: Optimizer, plan: int) -> None:
        """step() has run."""
        self._after = _Snapshot(optimizer)
        self._before.restore(optimizer, self._after)
        written = [*parameters_of(optimizer), *torch.ops.optfuse.tensors_ahead(plan)]
        only_read = set(map(id, self._there)).difference(map(id, written))
        self.used = Settings(optimizer, lambda tensor: id(tensor) not in only_read)

    def show(self, optimizer: Optimizer) -> None:
        self._after.restore(optimizer, self._before)

    def put_back(self, optimizer: Optimizer) -> None:
        """step() has failed."""
        self._before.restore(optimizer, None)

    def leave_out(self, param: Tensor) -> None:
        """show() leaves the entry of this parameter as it is."""
        self._after.take_entry(self._before, param)


class _Snapshot:
    """State, options and attributes."""

    def __init__(self, optimizer: Optimizer) -> None:
        own = optimizer.__dict__
        self._attributes = dict(own)
        self._options = list(map(dict, optimizer.param_groups))
        self._state = dict(own["state"])
        entries = self._state.values()
        self._entries = [dict(entry) if isinstance(entry, dict) else None for entry in entries]

    def restore(self, optimizer: Optimizer, now: _Snapshot | None) -> None:
        """now: another one, all between which becomes as it is here, and what a script has changed
        meanwhile stays. None: everything does."""
        own = optimizer.__dict__
        _restore(own, self._attributes, dict(own) if now is None else now._attributes)
        now = now or _Snapshot(optimizer)
        for holders in zip(optimizer.param_groups, self._options, now._options, strict=False):
            _restore(*holders)
        state, keys = own["state"], [*self._state]
        _restore(state, self._state, now._state)
        # In order, as a look-up by a tensor runs Python.
        known = are_same([*now._state], keys)
        before = now._entries if known else map(dict(now._items()).get, keys)
        holders = state.values() if are_same([*state], keys) else map(state.get, keys)
        for entry, items, then in zip(holders, self._entries, before, strict=True):
            if items is not None and then is not None and isinstance(entry, dict):
                _restore(entry, items, then)

    def _items(self) -> Iterable[tuple[Any, dict[Any, Any] | None]]:
        return zip(self._state, self._entries, strict=True)

    def take_entry(self, other: _Snapshot, param: Tensor) -> None:
        entries = dict(self._items())
        pairs = (self._state, other._state), (entries, dict(other._items()))
        for mine, its in pairs:
            mine.pop(param, None)
            mine.update((key, its[key]) for key in (param,) if key in its)
        self._entries = [*entries.values()]


_NOTHING = object()


def _restore(holder: dict[Any, Any], items: dict[Any, Any], now: dict[Any, Any]) -> None:
    """Where the holder has what it had `now`, it gets what is in items."""
    same = len(items) == len(now) and all(map(is_, items.values(), now.values()))
    if same and all(map(is_, items, now)):
        return
    for name, value in items.items():
        then = now.get(name, _NOTHING)
        if value is not then and holder.get(name, _NOTHING) is then:
            holder[name] = value
    for name in now.keys() - items.keys():
        if holder.get(name, _NOTHING) is now[name]:
            del holder[name]


def _owner_of(optimizer: Optimizer, slots: Slots, addresses: set[int]) -> str:
    for slot, param in enumerate(slots.params):
        for tensor in tensors_in([optimizer.state.get(param)]):
            if tensor.data_ptr() in addresses:
                return f" of {slots.labels[slot]}"
    return ""


def are_same(known: list[Any], found: list[Any]) -> bool:
    return len(known) == len(found) and all(map(is_, known, found))
