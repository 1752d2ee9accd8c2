# SPDX-License-Identifier: BSD-3-Clause
"""Final mode of a class without kernels."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from optfuse._updaters.slots import Slots
from optfuse._updaters.updater import OfPlan, Updater


class Alone(Updater):
    """By the class's own step(), on one parameter."""

    def __init__(self, of_plan: OfPlan) -> None:
        super().__init__(of_plan)
        self._updates = 0

    def explained(self, label: Callable[[int], str]) -> str:
        return f"own step(), on one parameter at a time: {self.described()}"

    def described(self) -> str:
        return f"its step() ran on {self._updates} gradients"

    def isa(self, dtype: int, on_cpu: bool) -> str:
        return "own step()"

    def asks(self) -> bool:
        return True

    def begin(self, optimizer: Optimizer, slots: Slots, in_backward: bool) -> bool:
        return in_backward

    def step_one(self, optimizer: Optimizer, slots: Slots, slot: int) -> None:
        super().step_one(optimizer, slots, slot)
        self._updates += 1
