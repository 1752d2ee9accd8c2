# SPDX-License-Identifier: BSD-3-Clause
"""Updates by the library's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from optfuse._gpu import is_on_gpu
from optfuse._scalars import DeviceScalars
from optfuse._updaters import entries
from optfuse._updaters.mixed_state import MixedState
from optfuse._updaters.slots import Slots
from optfuse._updaters.updater import Entry, OfPlan, Updater


class Kernels(Updater):
    """By a rule that the library has kernels for."""

    asks = False

    def __init__(self, of_plan: OfPlan) -> None:
        super().__init__(of_plan)
        self._scalars = DeviceScalars(self._plan, self._rule.scales)
        self._mixed = MixedState(self._plan, self._rule, of_plan.options.strict)

    @property
    def gpu_bits_differ(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._mixed.differ

    @property
    def is_untried(self) -> bool:  # type: ignore[override]
        return bool(self._mixed.new)

    def explained(self, label: Callable[[int], str]) -> str:
        return f"the rule {self._rule.name!r}, whose formula is in kernels/rules of the source"

    def tell_entry(
        self, slots: Slots, slot: int, entry: Entry | None, fresh: bool, flushed: bool
    ) -> bool:
        rule, entry = self._rule, {} if entry is None else entry
        if rule.as_made and not rule.counts_on_gpu:
            _bring_to_cpu(entry, rule.counters)
        tensors = tuple(map(entry.get, (*rule.state, *rule.counters)))
        step = entry.get("step") if rule.counts_steps else None
        if rule.takes_mixed:
            self._mixed.look(slots, slot, tensors)
        found = entries.Found(tensors, len(rule.state), step)
        return entries.tell(slots, slot, found, fresh, flushed)

    def make_entry(self, optimizer: Optimizer, slots: Slots, slot: int) -> None:
        group = optimizer.param_groups[slots.group_of[slot]]
        self._rule.make_state(optimizer, self._stock, group, slots.params[slot])

    def state_keys(self) -> tuple[str, ...]:
        rule = self._rule
        return (*rule.state, *rule.counters, *(("step",) if rule.counts_steps else ()))

    def changed_option(self, then: int, group: dict[str, Any], number: int) -> str | None:
        if number >= 0:
            return self._rule.options[number].partition(".")[0]
        return self._scalars.changed_option(then, group)

    def prepare(self, optimizer: Optimizer, same_groups: bool) -> bool:
        self._mixed.try_new(optimizer)
        return self._scalars.tell(optimizer, same_groups)


def _bring_to_cpu(entry: Entry, names: tuple[str, ...]) -> None:
    """load_state_dict() moves counters to their parameter."""
    for name in names:
        if is_on_gpu(entry.get(name)):
            entry[name] = entry[name].cpu()
