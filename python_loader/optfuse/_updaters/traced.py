# SPDX-License-Identifier: BSD-3-Clause
"""Updates by the programs of a traced class, which are made at each step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

from optfuse._library import bindings
from optfuse._library.bindings import Error, lib
from optfuse._own_step.noted import Noted
from optfuse._own_step.settings import Promise
from optfuse._snapshot import Groups, GroupsSnapshot
from optfuse._traced import updates
from optfuse._traced.rule import TracedRule
from optfuse._traced.standin import Untraceable
from optfuse._updaters import entries
from optfuse._updaters.slots import Slots
from optfuse._updaters.updater import Entry, Inputs, Updater

_UNTRACEABLE = (
    "optfuse: this step() of {} can't be traced: {}. Nothing was updated. Use "
    'optfuse.fuse(optimizer, mode="forward"), which leaves such steps to the class'
)


class Traced(Updater):
    """By programs. A program has this step's numbers in it, and the counters of all its
    parameters."""

    counts_together = True

    def __init__(
        self, stock: type[Optimizer], plan: int, rule: TracedRule, in_backward: bool
    ) -> None:
        of_class = stock, rule.promise, rule.made
        self.traced: updates.Traced = updates.Traced(plan, *of_class, in_backward)
        self._plan = plan
        self._stock = stock
        self._n_state = len(rule.state)
        self._in_backward = in_backward

    @property
    def promise(self) -> Promise:  # type: ignore[override]
        return self.traced.promise

    @promise.setter
    def promise(self, promise: Promise) -> None:
        self.traced.promise = promise

    def described(self) -> str:
        return self.traced.described()

    def explained(self, label: Callable[[int], str]) -> str:
        return self.traced.shown(label)

    # ---- parameters

    def is_tried(self) -> bool:
        return True

    def clear(self, optimizer: Optimizer, params: list[Tensor]) -> None:
        if self._is_unconfirmed():
            raise Error(
                "optfuse: a change of param_groups between backward() and step(): backward fusion "
                "has already updated parameters of this optimizer, whose counters step() advances; "
                "change param_groups before backward() or after step()"
            )
        self.traced.abandon(optimizer, params)

    def layout(self, groups: Groups) -> None:
        self.traced.layout(groups)

    # ---- options and state

    def are_same(self, told: GroupsSnapshot, groups: Groups) -> bool:
        return told.are_same(groups) if self._in_backward else told.have_same_params(groups)

    def tell_entry(
        self, slots: Slots, slot: int, entry: Entry | None, fresh: bool, flushed: bool
    ) -> bool:
        entry = {} if entry is None else entry
        tensors = tuple(map(entry.get, self.traced.state_names()))  # type: ignore[arg-type]
        counters = self.traced.counters_of(entry)
        found = entries.Found(tensors, self._n_state, None, counters)
        return entries.tell(slots, slot, found, fresh, flushed)

    def make_entry(self, optimizer: Optimizer, slots: Slots, slot: int) -> None:
        self.traced.make_state(optimizer, slot, slots.params[slot])

    def noted(self) -> Noted | None:
        return self.traced.noted

    # ---- a step

    def begin(self, optimizer: Optimizer, inputs: Inputs, same_groups: bool, updates: bool) -> bool:
        if not (self.traced.begun and self._is_unconfirmed()):
            try:
                self._make_programs(optimizer, inputs, whole=False)
            except Untraceable as error:
                if self._in_backward:
                    raise self._refusal(error) from error
                self._note_untraced(error)
                return False
        if updates:
            inputs.sync_inputs(optimizer, same_groups)  # else the next backward does it
        return True

    def begin_pass(self, optimizer: Optimizer, inputs: Inputs, same_groups: bool) -> None:
        try:
            self._make_programs(optimizer, inputs, whole=True)
        except Untraceable as error:
            raise self._refusal(error) from error
        inputs.sync_inputs(optimizer, same_groups)
        inputs.slots.sharing()

    def end(self, optimizer: Optimizer, inputs: Inputs, done: bool) -> None:
        if not self.traced.begun:
            return
        if done:
            self._advance(optimizer, inputs)
            inputs.sync_params(optimizer)
        elif not self._in_backward:
            bindings.flush(self._plan)
            self.traced.abandon(optimizer, inputs.slots.params)
            inputs.state.forget()

    def _make_programs(self, optimizer: Optimizer, inputs: Inputs, whole: bool) -> None:
        """whole: gradients are still to come."""
        same_state = inputs.state.is_same(optimizer.__dict__["state"])
        self.traced.begin(optimizer, inputs.slots.params, whole, same_state)

    def _advance(self, optimizer: Optimizer, inputs: Inputs) -> None:
        state, told = optimizer.__dict__["state"], inputs.state
        # In forward mode the guide was the last that could change the state; it was looked at
        # after that, and make_state() has the snapshot forgotten.
        same = told.is_same(state) if self._in_backward else not told.is_empty()
        kept = self.traced.advance(optimizer, inputs.slots.params, same)
        if inputs.used.has_changed():
            told.forget()
        elif not kept:
            told.remember(state)

    def _is_unconfirmed(self) -> bool:
        """Whether backward fusion has made updates that no step() has confirmed."""
        return self._in_backward and lib.of_shim_unconfirmed(self._plan)

    def _refusal(self, error: Untraceable) -> Error:
        return Error(_UNTRACEABLE.format(self._stock.__qualname__, error))

    def _note_untraced(self, error: Untraceable) -> None:
        traced = self.traced
        traced.untraced += 1
        traced.why_not = type(error), str(error)
        times = "once" if traced.untraced == 1 else f"{traced.untraced} times"
        self.own_step_because = (f"{times} it could not be traced: {error}",)
