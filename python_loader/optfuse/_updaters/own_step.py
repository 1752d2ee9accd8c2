# SPDX-License-Identifier: BSD-3-Clause
"""Updates by the class's own step() on one parameter, or by torch's operators as it runs them."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._library import bindings
from optfuse._library.bindings import Error, guard, lib_with_gil
from optfuse._library.default_device import DefaultDevice
from optfuse._own_step import updates
from optfuse._own_step.noted import Noted
from optfuse._own_step.reach import reachable
from optfuse._own_step.register import check_promise
from optfuse._own_step.settings import Promise
from optfuse._own_step.steady import Steady, why_unsteady
from optfuse._rules import Rule
from optfuse._updaters.slots import Groups, Slots
from optfuse._updaters.updater import CHANGED_GROUPS, Entry, OfPlan, Updater

_UNSTEADY = (
    "optfuse: backward fusion has updated parameters of this optimizer one by one, and now {}, so "
    "that the class's own step() would have to update all at once. Change state and options before "
    'backward() or after step(), or use optfuse.fuse(optimizer, mode="forward")'
)


class OwnStep(Updater):
    """By the class's own step()."""

    promise: Promise
    own_steps = 0  # of all parameters at once, of a class that can do without in steady groups
    _has_views = False  # of parameters, as told to the library
    _unsteady: str | None = None  # why the last backward pass has left all to step()
    may_share_state = True

    def __init__(self, of_plan: OfPlan) -> None:
        super().__init__(of_plan)
        self._own = updates.Own(self._plan, self._stock, self.promise, self._rule.entries)

    @classmethod
    def promised(cls, optimizer: Optimizer, stock: type[Optimizer], rule: Rule) -> Promise:
        return check_promise(optimizer, stock)

    def explained(self, label: Callable[[int], str]) -> str:
        return f"{self._rule.reference}, on one parameter at a time"

    def tried_on_cpu(self) -> int:
        return 0 if self._rule.is_own else super().tried_on_cpu()

    def clear(self, optimizer: Optimizer, params: list[Tensor]) -> None:
        if self._own.ran.slots:
            raise Error(CHANGED_GROUPS)

    def layout(self, groups: Groups) -> None:
        self._own.promise = self.promise
        self._own.layout(groups)

    def take_over(self, optimizer: Optimizer) -> None:
        self._own.note(optimizer)

    def tell_entry(
        self, slots: Slots, slot: int, entry: Entry | None, fresh: bool, flushed: bool
    ) -> bool:
        tensors = self._own.take_state(slot, entry)
        known = slots.states[slot]
        if known is None or len(known) != len(tensors) or not all(map(is_, known, tensors)):
            torch.ops.optfuse.set_state(slots.plan, slot, tensors, None, False)
            slots.states[slot] = tuple(tensors)
        return flushed

    def noted(self) -> Noted | None:
        return self._own.noted

    def begin(
        self, optimizer: Optimizer, slots: Slots, in_backward: bool, same_state: bool
    ) -> bool:
        steady = self.promise.steady
        if steady is not None:
            if not self._is_steady(optimizer, steady, in_backward):
                return False
            self._know_maps(optimizer, steady, slots)
        bindings.flush(self._plan)  # what is pending keeps its own options
        own = self._own
        if not in_backward:
            own.default_device = DefaultDevice()
        own.begin(optimizer, self._in_backward)
        if own.changed:
            lib_with_gil.of_shim_ledger_know_state(self._plan, optimizer, False)
            own.changed = False
        return True

    def _is_steady(self, optimizer: Optimizer, steady: Steady, in_backward: bool) -> bool:
        """Whether parameters are updated one by one. In forward mode nothing would be gained: the
        class's own step() updates all at once."""
        has_updated = bool(self._own.ran.slots)
        if not self._in_backward or not (in_backward or has_updated):
            self._note_own_step()
            return False
        self._unsteady = why_unsteady(optimizer, steady) if guard("steady") else None
        if self._unsteady is not None and has_updated:
            raise Error(_UNSTEADY.format(self._unsteady))
        return self._unsteady is None

    def _know_maps(self, optimizer: Optimizer, steady: Steady, slots: Slots) -> None:
        """Views of parameters in the class's maps don't make their memory shared."""
        held = [optimizer.__dict__.get(name) for name in steady.maps]
        tensors = {id(x): x for x in reachable(*held) if isinstance(x, Tensor)}
        views = [x for x in tensors.values() if slots.number_of(x) is None]
        for slot in range(len(slots)) if views or self._has_views else ():
            torch.ops.optfuse.know_aliases(self._plan, slot, views)
        self._has_views = bool(views)

    def _note_own_step(self) -> None:
        self.own_steps += 1
        why = "so they are in forward mode"
        if self._in_backward:
            why = f"the last time since {self._unsteady or 'backward() could use no gradient'}"
        self._unsteady = None
        times = "once" if self.own_steps == 1 else f"{self.own_steps} times"
        self.own_step_because = (f"{times} its updates were of all parameters at once: {why}",)

    def end(self, optimizer: Optimizer, slots: Slots, done: bool) -> None:
        if done:
            self._own.advance(optimizer)

    def failure(self) -> BaseException | None:
        return updates.interrupted()
