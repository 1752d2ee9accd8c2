# SPDX-License-Identifier: BSD-3-Clause
"""The interface between an optimizer's link and how its updates are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from optfuse._library.bindings import BACKWARD, lib
from optfuse._noted import Noted, step_of
from optfuse._options import Options
from optfuse._rules import Rule
from optfuse._trials.stock_trial import unknown_dtypes
from optfuse._updaters.slots import Groups, Slots

Entry = dict[str, Any]
CHANGED_GROUPS = (
    "optfuse: a change of param_groups between backward() and step(): backward fusion has already "
    "updated parameters of this optimizer, whose counters step() advances; change param_groups "
    "before backward() or after step()"
)


class OfPlan(NamedTuple):
    """The data by which the updater of a plan is made."""

    plan: int
    stock: type[Optimizer]
    rule: Rule
    options: Options


class Updater:
    """How the updates of one optimizer are made. Knows neither the optimizer nor its link between
    two calls, so that it keeps none of them alive."""

    gpu_bits_differ: tuple[str, ...] = ()  # kinds of parameters, found since fuse()
    counts_together = False  # step() advances the counters of all parameters at once
    is_untried = False  # prepare() has to try updates of state that it was told of
    asks = True  # begin() and end() have something to do
    tells_state = True  # by tell_entry()
    updates_by = ""  # what is no kernel
    may_share_state = False  # two parameters may have a tensor of their state in common

    def __init__(self, of_plan: OfPlan) -> None:
        self._stock = of_plan.stock
        self._plan = of_plan.plan
        self._rule = of_plan.rule
        self._in_backward = of_plan.options.mode == BACKWARD

    def described(self) -> str:
        """In a line of the summary; empty: nothing is to be said."""
        return ""

    def explained(self, label: Callable[[int], str]) -> str:
        """Describes an update for people. label: names a slot's parameter."""
        raise NotImplementedError

    # ---- parameters

    def tried_on_cpu(self) -> int:
        """A bit for each dtype whose updates must pass a trial on the CPU, in the library's
        order."""
        return unknown_dtypes(self._rule)

    def is_tried(self) -> bool:
        """Whether updates must pass a trial for some dtype or device."""
        return self._rule.tried or bool(self.tried_on_cpu())

    def clear(self, optimizer: Optimizer, params: list[Tensor]) -> None:
        """The library is about to be told of all parameters anew. params: those that there were.
        Raises optfuse.Error if that can't be now."""

    def layout(self, groups: Groups) -> None:
        """The library was told of all parameters anew."""

    def take_over(self, optimizer: Optimizer) -> None:
        """Updates from before the library was told anew are still to be confirmed."""

    def is_unconfirmed(self) -> bool:
        """Whether backward fusion has made updates that no step() has confirmed."""
        return self._in_backward and lib.of_shim_unconfirmed(self._plan)

    # ---- options and state

    def tell_entry(
        self, slots: Slots, slot: int, entry: Entry | None, fresh: bool, flushed: bool
    ) -> bool:
        """Tells the library of the state of one slot. flushed: nothing is pending; returns whether
        that is so now."""
        raise NotImplementedError

    def make_entry(self, optimizer: Optimizer, slots: Slots, slot: int) -> None:
        """Makes the state of a parameter, as stock does at its first gradient, if the update does
        not make it itself."""

    def state_keys(self) -> tuple[str, ...] | None:
        """The keys of a state entry that an update uses; None: all."""
        return None

    def changed_option(self, then: int, group: dict[str, Any], number: int) -> str | None:
        """The first option in which a group differs from what updates of group `then` used.
        number: of the one in which the library found a difference, in its order; -1: none."""
        noted = self.noted()
        return None if noted is None else noted.changed_option(then, group)

    def changed_attribute(self, optimizer: Optimizer) -> str | None:
        """The first attribute of the optimizer that differs from what updates used."""
        noted = self.noted()
        return None if noted is None else noted.changed_attribute(optimizer)

    def noted(self) -> Noted | None:
        """Options and attributes as updates of backward mode used them, if these run the class's
        own code."""
        return None

    # ---- a step

    def begin(
        self, optimizer: Optimizer, slots: Slots, in_backward: bool, same_state: bool
    ) -> bool:
        """Comes before the library is told of options and state for this step, or at the first
        complete gradient of a backward pass. same_state: the library knows it. False: no updates
        can be made, and the class's own step() must take this step."""
        return True

    def take_step(self, optimizer: Optimizer) -> None:
        """begin() has said that the class's own step() must."""
        step_of(self._stock)(optimizer)

    def prepare(self, optimizer: Optimizer, same_groups: bool) -> bool:
        """Comes after it. Whether the next step needs it, too, whatever the options are."""
        return False

    def end(self, optimizer: Optimizer, slots: Slots, done: bool) -> None:
        """The updates of this step are certain; not done: it failed."""
