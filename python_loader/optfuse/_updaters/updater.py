# SPDX-License-Identifier: BSD-3-Clause
"""The interface between an optimizer's link and how its updates are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from optfuse._late import Used
from optfuse._own_step.noted import Noted
from optfuse._own_step.settings import Promise
from optfuse._snapshot import Groups, GroupsSnapshot, StateSnapshot
from optfuse._traced.updates import Traced
from optfuse._updaters.slots import Slots

Entry = dict[str, Any]


class Inputs(Protocol):
    """A fused optimizer's link: tells the library what updates read."""

    slots: Slots
    used: Used
    state: StateSnapshot  # as the library was told of it

    def sync_params(self, optimizer: Optimizer) -> None:
        """Tells the library of all anew if param_groups has other parameters."""

    def sync_inputs(self, optimizer: Optimizer, same_groups: bool) -> None:
        """Tells the library which options and state have changed."""


class Updater:
    """How the updates of one optimizer are made. Knows neither the optimizer nor its link between
    two calls, so that it keeps none of them alive."""

    promise: Promise | None = None  # what the class does beside updating parameters
    traced: Traced | None = None  # the programs of a traced class
    own_step_because: tuple[str, ...] = ()  # why updates are the class's own step()
    counts_together = False  # step() advances the counters of all parameters at once
    may_share_state = False  # two parameters may have a tensor of their state in common

    def described(self) -> str:
        """In a line of the summary; empty: nothing is to be said."""
        return ""

    def explained(self, label: Callable[[int], str]) -> str:
        """What an update computes, for people. label: names a slot's parameter."""
        raise NotImplementedError

    # ---- parameters

    def tried_on_cpu(self) -> int:
        """A bit for each dtype whose updates must pass a trial on the CPU, in the library's
        order."""
        return 0

    def is_tried(self) -> bool:
        """Whether updates must pass a trial for some dtype or device."""
        return bool(self.tried_on_cpu())

    def clear(self, optimizer: Optimizer, params: list[Tensor]) -> None:
        """The library is about to be told of all parameters anew. params: those that there were.
        Raises optfuse.Error if that can't be now."""

    def layout(self, groups: Groups) -> None:
        """The library was told of all parameters anew."""

    def take_over(self, optimizer: Optimizer) -> None:
        """Updates from before the library was told anew are still to be confirmed."""

    # ---- options and state

    def are_same(self, told: GroupsSnapshot, groups: Groups) -> bool:
        """Whether the parameters and options of which step() tells the library are as told."""
        return told.are_same(groups)

    def tell_entry(
        self, slots: Slots, slot: int, entry: Entry | None, fresh: bool, flushed: bool
    ) -> bool:
        """Tells the library of the state of one slot. flushed: nothing is pending; returns whether
        that is so now."""
        raise NotImplementedError

    def make_entry(self, optimizer: Optimizer, slots: Slots, slot: int) -> None:
        """Makes the state of a parameter, as stock does at its first gradient."""
        raise NotImplementedError

    def state_keys(self) -> tuple[str, ...] | None:
        """The keys of a state entry that an update uses; None: all."""
        return None

    def changed_option(self, number: int, group: dict[str, Any]) -> str | None:
        """The first option in which a group differs from what updates of group `number` used."""
        noted = self.noted()
        return None if noted is None else noted.changed_option(number, group)

    def changed_attribute(self, optimizer: Optimizer) -> str | None:
        """The first attribute of the optimizer that differs from what updates used."""
        noted = self.noted()
        return None if noted is None else noted.changed_attribute(optimizer)

    def noted(self) -> Noted | None:
        """Options and attributes as updates of backward mode used them, if these run the class's
        own code."""
        return None

    # ---- a step

    def begin(self, optimizer: Optimizer, inputs: Inputs, same_groups: bool, updates: bool) -> bool:
        """Brings what updates of this step read up to date. same_groups: as are_same() says.
        updates: the library has some to make. False: no updates can be
        made, and the class's own step() must take this step."""
        raise NotImplementedError

    def begin_pass(self, optimizer: Optimizer, inputs: Inputs, same_groups: bool) -> None:
        """The same at the first complete gradient of a backward pass."""
        raise NotImplementedError

    def end(self, optimizer: Optimizer, inputs: Inputs, done: bool) -> None:
        """The updates of this step are certain; not done: it failed."""

    def failure(self) -> BaseException | None:
        """What the class's own step() raised in the update that failed."""
        return None
