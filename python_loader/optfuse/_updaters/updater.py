# SPDX-License-Identifier: BSD-3-Clause
"""The interface between an optimizer's link and how its updates are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._class_code import Own, step_of
from optfuse._late import Settings
from optfuse._library.bindings import BACKWARD, lib
from optfuse._options import Options
from optfuse._rules import Rule
from optfuse._updaters.one_parameter import step_alone
from optfuse._updaters.slots import Groups, Slots

Entry = dict[str, Any]
NONE_PATCHED: Mapping[str, Callable[..., Any]] = MappingProxyType({})
CHANGED_GROUPS = (
    "optfuse: a change of param_groups between backward() and step(): backward fusion has already "
    "updated parameters of this optimizer, whose counters step() advances; change param_groups "
    "before backward() or after step()"
)


def has_scale(optimizer: Optimizer) -> bool:
    """Whether a loss scale or an overflow flag was set, as GradScaler does on GPUs, or by hand."""
    return any(optimizer.__dict__.get(name) is not None for name in ("grad_scale", "found_inf"))


class OfPlan(NamedTuple):
    """The data by which the updater of a plan is made."""

    plan: int
    stock: type[Optimizer]
    rule: Rule
    options: Options
    methods: Mapping[str, Callable[..., Any]]  # of the object itself, in the place of its class's


class Updater:
    """How the updates of one optimizer are made. Knows neither the optimizer nor its link between
    two calls, so that it keeps none of them alive."""

    gpu_bits_differ: tuple[str, ...] = ()  # kinds of parameters, found since fuse()

    def __init__(self, of_plan: OfPlan) -> None:
        self._own = Own(of_plan.stock, of_plan.methods)
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

    def isa(self, dtype: int, on_cpu: bool) -> str:
        """The instruction set, or whatever else runs updates of a dtype, by its place in the
        library's order."""
        return lib.of_shim_isa(self._plan, dtype).decode() if on_cpu else "cuda"

    # ---- parameters

    def tried_on_cpu(self) -> int:
        """A bit for each dtype whose updates must pass a trial on the CPU, in the library's
        order."""
        return 0

    def is_tried(self) -> bool:
        """Whether updates must pass a trial for some dtype or device."""
        return False

    def clear(self, optimizer: Optimizer) -> None:
        """The library is about to be told of all parameters anew. Raises optfuse.Error if that
        can't be now."""

    def layout(self, groups: Groups) -> None:
        """The library was told of all parameters anew."""

    def is_unconfirmed(self) -> bool:
        """Whether backward fusion has made updates that no step() has confirmed."""
        return self._in_backward and lib.of_shim_unconfirmed(self._plan)

    def is_ahead(self, slot: int) -> bool:
        """Whether that is so of one parameter."""
        return lib.of_shim_is_updated(self._plan, slot)  # type: ignore[no-any-return]

    # ---- options and state

    def tell_state(self, optimizer: Optimizer, slots: Slots) -> list[int]:
        """Tells the library of the state, if it does not find that in step(). The slots whose state
        others hold, too."""
        return []

    def tell_entry(self, optimizer: Optimizer, slots: Slots, slot: int) -> None:
        """tell_state() of one parameter."""

    def make_entry(self, optimizer: Optimizer, slots: Slots, slot: int) -> None:
        """Makes and tells the state of a parameter, as stock does at its first gradient, if the
        update does not make it itself."""

    def state_keys(self) -> tuple[str, ...] | None:
        """The keys of a state entry that an update uses; None: all."""
        return None

    def changed_option(self, then: int, group: dict[str, Any], number: int) -> str | None:
        """The first option in which a group differs from what updates of group `then` used.
        number: of the one in which the library found a difference, in its order; -1: none."""
        used = self.used()
        return None if used is None else used.changed_option(then, group)

    def changed_attribute(self, optimizer: Optimizer, slots: Slots) -> str:
        """A sentence on the first attribute of the optimizer that differs from what updates used;
        empty: none."""
        used = self.used()
        name = None if used is None else used.changed_attribute(optimizer)
        if name is None:
            return ""
        return f"the optimizer's attribute {name!r}, which its step() may read, was changed"

    def used(self) -> Settings | None:
        """Options and attributes as updates of backward mode used them, if these run the class's
        own code."""
        return None

    # ---- a step

    def asks(self) -> bool:
        """Whether begin() and end() have something to do in each step."""
        return type(self).end is not Updater.end

    def evaluate(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """The loss, before anything else in a step(closure)."""
        with torch.enable_grad():
            return closure()

    def begin(self, optimizer: Optimizer, slots: Slots, in_backward: bool) -> bool:
        """Comes before the library is told of options and state for this step, or at the first
        complete gradient of a backward pass. False: no updates can be made, and the class's own
        step() must take this step."""
        return True

    def take_step(self, optimizer: Optimizer) -> None:
        """begin() has said that the class's own step() must."""
        step_of(self._stock)(optimizer)

    def prepare(self, optimizer: Optimizer, same_groups: bool) -> bool:
        """Comes after it. Whether the next step needs it, too, whatever the options are."""
        return False

    def runs_alone(self) -> bool:
        """Final mode: whether step_one() makes all updates, in Python."""
        return False

    def step_one(self, optimizer: Optimizer, slots: Slots, slot: int) -> None:
        """step(), of one parameter: has run when this returns."""
        param = slots.params[slot]
        if param.grad is not None:
            place = slots.group_of[slot], slots.place_of[slot]
            step_alone(optimizer, self._own, param, *place)

    def apply(self, optimizer: Optimizer, slot: int, param: Tensor) -> Entry:
        """An update that runs Python. Returns the entry of the state."""
        raise NotImplementedError

    def end(self, optimizer: Optimizer, slots: Slots, done: bool) -> None:
        """The updates of this step are certain; not done: it failed."""

    def give_up(self, optimizer: Optimizer) -> None:
        """Updates that are prepared are not wanted. Those that are made stay."""
