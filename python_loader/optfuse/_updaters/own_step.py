# SPDX-License-Identifier: BSD-3-Clause
"""Updates by the class's own step() on one parameter, or by torch's operators as it runs them."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_

import torch
from torch.optim import Optimizer

from optfuse._library import bindings
from optfuse._library.bindings import lib_with_gil
from optfuse._library.default_device import DefaultDevice
from optfuse._own_step import updates
from optfuse._own_step.noted import Noted
from optfuse._own_step.register import check_promise
from optfuse._own_step.settings import Promise
from optfuse._rules import Rule
from optfuse._updaters.slots import Groups, Slots
from optfuse._updaters.updater import Entry, OfPlan, Updater


class OwnStep(Updater):
    """By the class's own step()."""

    promise: Promise
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
        bindings.flush(self._plan)  # what is pending keeps its own options
        own = self._own
        if not in_backward:
            own.default_device = DefaultDevice()
        own.begin(optimizer, self._in_backward)
        if own.changed:
            lib_with_gil.of_shim_ledger_know_state(self._plan, optimizer, False)
            own.changed = False
        return True

    def end(self, optimizer: Optimizer, slots: Slots, done: bool) -> None:
        if done:
            self._own.advance(optimizer)

    def failure(self) -> BaseException | None:
        return updates.interrupted()
