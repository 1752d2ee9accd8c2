# SPDX-License-Identifier: BSD-3-Clause
"""Final mode of a class without kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from optfuse._library.bindings import lib_with_gil
from optfuse._updaters.one_parameter import step_alone
from optfuse._updaters.slots import Slots
from optfuse._updaters.updater import OfPlan, Updater


class Alone(Updater):
    """By the class's own step(), on one parameter."""

    def __init__(self, of_plan: OfPlan) -> None:
        super().__init__(of_plan)
        self._updates = 0
        self._hidden: Slots | None = None  # whose gradients step() finds to be None

    def explained(self, label: Callable[[int], str]) -> str:
        return f"own step(), on one parameter at a time: {self.described()}"

    def described(self) -> str:
        return f"its step() ran on {self._updates} gradients"

    def isa(self, dtype: int, on_cpu: bool) -> str:
        return "own step()"

    def asks(self) -> bool:
        return True

    def runs_alone(self) -> bool:
        return True

    def begin(self, optimizer: Optimizer, slots: Slots, in_backward: bool) -> bool:
        return in_backward

    def step_one(self, optimizer: Optimizer, slots: Slots, slot: int) -> None:
        if slots is not self._hidden:
            lib_with_gil.of_shim_hide_gradients(self._plan, slots.params)
            self._hidden = slots
        param = slots.params[slot]

        def run(step: Any) -> None:
            lib_with_gil.of_shim_step_alone(self._plan, step, (optimizer,), param)

        place = slots.group_of[slot], slots.place_of[slot]
        if param.grad is not None:
            step_alone(optimizer, self._own, param, *place, run)
            self._updates += 1
