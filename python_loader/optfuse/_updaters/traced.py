# SPDX-License-Identifier: BSD-3-Clause
"""Updates by the programs of a traced class, which are made at each step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

from optfuse._library import bindings
from optfuse._library.bindings import Error, lib_with_gil
from optfuse._own_step.noted import Noted
from optfuse._own_step.settings import Promise
from optfuse._refuse import refuse_untraceable
from optfuse._traced import updates
from optfuse._traced.rule import TracedRule
from optfuse._traced.standin import Untraceable
from optfuse._traced.trial import try_first, try_traced
from optfuse._trials.rule_choice import FuseBy
from optfuse._updaters import entries
from optfuse._updaters.slots import Groups, Slots
from optfuse._updaters.updater import CHANGED_GROUPS, Entry, OfPlan, Updater

_UNTRACEABLE = (
    "optfuse: this step() of {} can't be traced: {}. Nothing was updated. Use "
    'optfuse.fuse(optimizer, mode="forward"), which leaves such steps to the class'
)


class Traced(Updater):
    """By programs. A program has this step's numbers in it, and the counters of all its
    parameters."""

    promise: Promise
    counts_together = True

    def __init__(self, of_plan: OfPlan) -> None:
        super().__init__(of_plan)
        assert isinstance(of_plan.rule, TracedRule)
        of_class = self._stock, self.promise, of_plan.rule.made
        self.traced: updates.Traced = updates.Traced(self._plan, *of_class, self._in_backward)
        self.has_no_options = not self._in_backward

    @classmethod
    def tried(cls, optimizer: Optimizer, fuse: FuseBy, in_backward: bool) -> TracedRule:
        stock = type(optimizer)
        try:
            rule = try_traced(optimizer, stock, fuse)
            if in_backward:
                try_first(optimizer, stock, rule)
            return rule
        except Untraceable as error:
            refuse_untraceable(stock, str(error))

    @classmethod
    def promised(cls, optimizer: Optimizer, stock: type[Optimizer], rule: TracedRule) -> Promise:  # type: ignore[override]
        return rule.promise  # found when the class was traced

    def described(self) -> str:
        return self.traced.described()

    def explained(self, label: Callable[[int], str]) -> str:
        return self.traced.shown(label)

    # ---- parameters

    def tried_on_cpu(self) -> int:
        return 0

    def is_tried(self) -> bool:
        return True

    def clear(self, optimizer: Optimizer, params: list[Tensor]) -> None:
        if self.is_unconfirmed():
            raise Error(CHANGED_GROUPS)
        self.traced.abandon(optimizer, params)

    def layout(self, groups: Groups) -> None:
        self.traced.recording.promise = self.promise
        self.traced.layout(groups)

    # ---- options and state

    def tell_entry(
        self, slots: Slots, slot: int, entry: Entry | None, fresh: bool, flushed: bool
    ) -> bool:
        entry = {} if entry is None else entry
        tensors = tuple(map(entry.get, self.traced.state_names()))  # type: ignore[arg-type]
        counters = self.traced.counters_of(entry)
        found = entries.Found(tensors, len(self._rule.state), None, counters)
        return entries.tell(slots, slot, found, fresh, flushed)

    def make_entry(self, optimizer: Optimizer, slots: Slots, slot: int) -> None:
        self.traced.make_state(optimizer, slot, slots.params[slot])

    def noted(self) -> Noted | None:
        return self.traced.noted

    # ---- a step

    def holds_counters(self) -> bool:
        return self.traced.holds_counters()

    def begin(
        self, optimizer: Optimizer, slots: Slots, in_backward: bool, same_state: bool
    ) -> bool:
        try:
            if in_backward or not (self.traced.begun and self.is_unconfirmed()):
                self.traced.begin(optimizer, slots.params, in_backward, same_state)
        except Untraceable as error:
            if self._in_backward:
                raise Error(_UNTRACEABLE.format(self._stock.__qualname__, error)) from error
            self._note_untraced(error)
            return False
        return True

    def end(self, optimizer: Optimizer, slots: Slots, done: bool) -> None:
        if not self.traced.begun:
            return
        plan, ledger = self._plan, lib_with_gil
        if done:
            # In forward mode the guide was the last that could change the state; it was looked at
            # after that, and the ledger knows what it has made.
            same = ledger.of_shim_ledger_same_state(plan, optimizer, self._in_backward)
            if not self.traced.advance(optimizer, slots.params, same):
                ledger.of_shim_ledger_know_state(plan, optimizer, True)
        elif not self._in_backward:
            bindings.flush(plan)
            self.traced.abandon(optimizer, slots.params)
            ledger.of_shim_ledger_know_state(plan, optimizer, False)

    def _note_untraced(self, error: Untraceable) -> None:
        traced = self.traced
        traced.untraced += 1
        traced.why_not = type(error), str(error)
        times = "once" if traced.untraced == 1 else f"{traced.untraced} times"
        self.own_step_because = (f"{times} it could not be traced: {error}",)
