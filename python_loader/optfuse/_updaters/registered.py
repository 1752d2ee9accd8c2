# SPDX-License-Identifier: BSD-3-Clause
"""Backward mode of a class that is registered: its own step() runs whenever a parameter's gradient
is complete, on the optimizer as it is, and finds no other gradient. Of Adafactor and Muon the
library makes most updates without it (native.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._arguments.check import parameters_of
from optfuse._backward import consumed_gradients
from optfuse._class_code import step_of, without_hooks
from optfuse._gpu import is_gpu
from optfuse._late import Settings, no_parameters, tensors_in
from optfuse._library import releases
from optfuse._library.bindings import Error, guard, lib, lib_with_gil
from optfuse._library.default_device import DefaultDevice
from optfuse._rules import RegisteredRule
from optfuse._updaters.native import NATIVE
from optfuse._updaters.one_parameter import draws_of
from optfuse._updaters.recorded import are_same
from optfuse._updaters.shared_state import shares_with_others
from optfuse._updaters.slots import Groups, Slots
from optfuse._updaters.updater import Entry, OfPlan, Updater, has_scale

_UNTOLD: list[Any] = [object()]  # values that no entry has, not even an empty one
_CHANGED = (
    "optfuse: it changed {}, and a class that is registered may change nothing but its parameter "
    "and that one's state. Leave optfuse.register() out for this class: its step() is recorded then"
)
_MANY_LOOKS = 100  # take longer than an update of a small parameter
_thread = threading.local()
_RELEASE = releases.release_of(str(torch.__version__))
_late: list[int] = []  # plans of optimizers that died during an update


def running() -> bool:
    """Whether this thread is in the middle of an update, and holds its plan's lock."""
    return getattr(_thread, "depth", 0) > 0


def free_plan(plan: int) -> None:
    """Frees the plan of an optimizer that is gone. Inside an update, which holds locks that this
    needs, it is done later."""
    _late.append(plan)
    _free_late()


def _free_late() -> None:
    while _late and not running():
        lib.of_shim_plan_free(_late.pop())


class _Asked(Exception):
    """A step() calls its closure."""


class Registered(Updater):
    """By the class's own step(), on one parameter."""

    def __init__(self, of_plan: OfPlan) -> None:
        super().__init__(of_plan)
        assert isinstance(of_plan.rule, RegisteredRule)
        self._name = of_plan.rule.native
        self._native = NATIVE.get(self._name)
        self._step = step_of(self._stock)
        self._default_device = DefaultDevice()
        self._used: Settings | None = None
        self._entries: list[Entry | None] = []  # by slot, and what is in them
        self._values: list[list[Any]] = []
        self._places: list[tuple[int, int]] = []  # of each parameter in the groups
        self._keys: list[Any] = []  # of the state, that are no parameters
        self._begun_by: int | None = None  # the thread that has noted all this since step()
        self._dropped: list[Tensor] = []  # parameters whose .grad step() has set to None
        self._updates = 0

    def explained(self, label: Callable[[int], str]) -> str:
        how = "torch's operators, or its " if self._native else ""
        return f"{how}own step(), on one parameter at a time: {self.described()}"

    def described(self) -> str:
        what = f"its step() ran on {self._updates} gradients"
        looks = lib.of_shim_looks_in_vain(self._plan) // max(1, self._updates)
        if looks < _MANY_LOOKS:
            return what
        return (
            f"{what}, and looked at {looks} other parameters each time: with so many it is faster "
            "without register(), or in forward mode"
        )

    def isa(self, dtype: int, on_cpu: bool) -> str:
        return "torch's operators" if self._native else "own step()"

    def layout(self, groups: Groups) -> None:
        native = self._name if self._native and _holds(self._name, groups) else ""
        torch.ops.optfuse.run_own_step(self._plan, native)
        self._begun_by = None

    def used(self) -> Settings | None:
        return self._used

    def evaluate(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """step() may ignore its closure. Without gradients it changes nothing."""

        def ask() -> None:
            raise _Asked

        no_gradients = consumed_gradients.aside(parameters_of(optimizer), others=True)
        try:
            with no_gradients, without_hooks(optimizer), self._own.seen(optimizer):
                return self._step(optimizer, ask)
        except _Asked:
            return super().evaluate(optimizer, closure)

    def begin(self, optimizer: Optimizer, slots: Slots, in_backward: bool) -> bool:
        if in_backward:
            return self._begin_pass(optimizer, slots)
        self._default_device = DefaultDevice()
        with consumed_gradients.aside(slots.params):
            late = [slot for slot, param in enumerate(slots.params) if param.grad is not None]
            if late or (self._native and has_scale(optimizer)):  # Adafactor asserts that none is
                self._step_late(optimizer, slots, late)
        return True

    def _step_late(self, optimizer: Optimizer, slots: Slots, late: list[int]) -> None:
        state = optimizer.state
        new = [slot for slot in late if slots.params[slot] not in state]
        with self._own.seen(optimizer):
            self._step(optimizer)
        for slot in new:  # whose entries come in the order of the parameters
            if slots.params[slot] in state:
                lib_with_gil.of_shim_ledger_note_entry(self._plan, slot, True)

    def end(self, optimizer: Optimizer, slots: Slots, done: bool) -> None:
        while done and self._dropped:
            self._dropped.pop().grad = None
        if done:
            self._begun_by = None

    def _begin_pass(self, optimizer: Optimizer, slots: Slots) -> bool:
        if slots.sharded is not None or shares_with_others(optimizer):
            return False
        if self._native and has_scale(optimizer):
            return False
        groups = optimizer.param_groups
        if any(is_gpu(param.device) for param in slots.params) or any(map(_reads_dtype, groups)):
            return False
        if self._begun_by not in (None, threading.get_ident()):
            return True  # that thread may be in the middle of an update
        self._begun_by = threading.get_ident()
        if self._native is not None:
            numbers = [n for group in groups for n in self._native.numbers(group)]
            torch.ops.optfuse.set_numbers(self._plan, len(self._native.options), numbers)
        lib_with_gil.of_shim_hide_gradients(self._plan, slots.params)
        self._entries, self._values = [None] * len(slots), [_UNTOLD] * len(slots)
        state = optimizer.state
        self._keys = no_parameters(state)
        self._places = list(zip(slots.group_of, slots.place_of, strict=True))
        for slot, param in enumerate(slots.params):
            self._know(slot, state.get(param))
        if not self.is_unconfirmed():
            torch.ops.optfuse.note_versions(self._plan, list(range(len(slots))))
            self._used = Settings(optimizer)
        return True

    def _know(self, slot: int, entry: Entry | None) -> None:
        values = _values_of(entry)
        if not are_same(values, self._values[slot]):
            native = self._native
            tensors = native.tensors(entry) if native else list(tensors_in(values))
            torch.ops.optfuse.know_state(self._plan, slot, tensors)
        self._entries[slot], self._values[slot] = entry, values

    def _is_known(self, slot: int, entry: Entry | None) -> bool:
        """Whether the entry has what it had when the pass began."""
        return entry is self._entries[slot] and are_same(_values_of(entry), self._values[slot])

    def apply(self, optimizer: Optimizer, slot: int, param: Tensor) -> Entry:
        state = optimizer.state
        before, gradient = Settings(optimizer, keys=self._keys), param.grad
        n_others = len(state) - (param in state)
        is_known = self._is_known(slot, state.get(param))
        _thread.depth = getattr(_thread, "depth", 0) + 1
        try:
            with (
                self._default_device.here(),
                self._own.seen(optimizer),
                without_hooks(optimizer),
                draws_of(optimizer, self._own, param, *self._places[slot]),
            ):
                lib_with_gil.of_shim_step_alone(self._plan, self._step, (optimizer,), param)
        finally:
            _thread.depth -= 1
        if param.grad is None:  # step() has set it: then that appears in step()
            param.grad = gradient
            self._dropped.append(param)
        changed = before.changed(optimizer)
        if changed is None and len(state) - (param in state) != n_others:
            changed = "the state of another parameter"
        if changed is None and not is_known:
            changed = "the state of this parameter before that had its gradient"
        if changed is not None and guard("alone"):
            raise Error(_CHANGED.format(changed))
        entry: Entry | None = state.get(param)
        self._know(slot, entry)
        self._updates += 1
        return entry or {}


def _values_of(entry: Entry | None) -> list[Any]:
    return list(entry.values()) if isinstance(entry, dict) else [entry]


def _holds(native: str, groups: Groups) -> bool:
    """Whether the update is known to have the bits of this release."""
    dtypes = {str(p.dtype).removeprefix("torch.") for group in groups for p in group["params"]}
    return all(releases.holds(native, dtype, _RELEASE) for dtype in dtypes)


def _reads_dtype(group: dict[str, Any]) -> bool:
    """Adafactor's step() takes the epsilon of the first parameter's dtype for all of a group."""
    eps = group.get("eps")
    is_first = isinstance(eps, (tuple, list)) and eps[:1] in ((None,), [None])
    return is_first and len({param.dtype for param in group["params"]}) > 1
