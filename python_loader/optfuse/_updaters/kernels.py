# SPDX-License-Identifier: BSD-3-Clause
"""Updates by the library's kernels."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._dtensor.local_tensors import check_layout, is_dtensor, local_of
from optfuse._gpu import is_gpu, is_on_gpu
from optfuse._library import bindings
from optfuse._library.bindings import Error, guard, lib_with_gil
from optfuse._scalars import DeviceScalars
from optfuse._trials.stock_trial import unknown_dtypes
from optfuse._updaters.mixed_state import MixedState
from optfuse._updaters.slots import Slots
from optfuse._updaters.updater import Entry, OfPlan, Updater, has_scale

_LATE_SCALE = (
    "optfuse: grad_scale or found_inf of the optimizer was set between backward() and step(), but "
    "backward() has made updates without it. Set both to None and call step(), which confirms "
    'these; set them before backward(), or use mode="forward"'
)


class Kernels(Updater):
    """By a rule that the library has kernels for."""

    def __init__(self, of_plan: OfPlan) -> None:
        super().__init__(of_plan)
        self._scalars = DeviceScalars(self._plan, self._rule.scales)
        self._mixed = MixedState(self._plan, self._rule, of_plan.options.strict)

    @property
    def gpu_bits_differ(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._mixed.differ

    def explained(self, label: Callable[[int], str]) -> str:
        return f"the rule {self._rule.name!r}, whose formula is in kernels/rules of the source"

    def tried_on_cpu(self) -> int:
        return unknown_dtypes(self._rule)

    def is_tried(self) -> bool:
        return self._rule.tried or bool(self.tried_on_cpu())

    def tell_state(self, optimizer: Optimizer, slots: Slots) -> list[int]:
        state: dict[Tensor, Entry] = optimizer.__dict__["state"]
        flushed = False
        for slot, param in enumerate(slots.params):
            flushed = self._tell_entry(slots, slot, state.get(param), False, flushed)
        return slots.sharing()

    def tell_entry(self, optimizer: Optimizer, slots: Slots, slot: int) -> None:
        entry = optimizer.__dict__["state"].get(slots.params[slot])
        self._tell_entry(slots, slot, entry, False, False)

    def make_entry(self, optimizer: Optimizer, slots: Slots, slot: int) -> None:
        group, param = optimizer.param_groups[slots.group_of[slot]], slots.params[slot]
        self._rule.make_state(optimizer, self._stock, group, param)
        self._tell_entry(slots, slot, optimizer.state[param], True, False)

    def _tell_entry(
        self, slots: Slots, slot: int, entry: Entry | None, fresh: bool, flushed: bool
    ) -> bool:
        """Tells the library, if it knows another state. Whether the plan is flushed now. Once does
        for many slots: a flush looks at every slot, and nothing becomes pending before the next
        step."""
        rule, param, entry = self._rule, slots.params[slot], {} if entry is None else entry
        if rule.as_made and not rule.counts_on_gpu:
            _bring_to_cpu(entry, rule.counters)
        tensors = tuple(map(entry.get, (*rule.state, *rule.counters)))
        step = entry.get("step") if rule.counts_steps else None
        if rule.takes_mixed:
            self._mixed.look(slots, slot, tensors)
        known, now = slots.states[slot], (*tensors, step)
        if known is not None and all(map(is_, known, now)):
            return flushed
        if step is not None and not _countable(step, param):
            raise Error(
                f"optfuse: state['step'] of {slots.labels[slot]} must be a 0-dim float tensor on "
                "the CPU, or a float32 one on its parameter's GPU, as torch.optim makes it, not "
                f"{step!r}"
            )
        replaces = known is not None and any(tensor is not None for tensor in known)
        if replaces and not flushed:  # what is pending is for the old ones
            bindings.flush(slots.plan)
        if is_dtensor(param):
            for tensor in tensors[: len(rule.state)]:
                if tensor is not None:
                    check_layout("the optimizer state", slots.labels[slot], param, tensor)
        locals_ = list(map(local_of, tensors)) if is_dtensor(param) else list(tensors)
        torch.ops.optfuse.set_state(slots.plan, slot, locals_, step, fresh)
        slots.states[slot] = now
        if slots.sharded is not None and is_dtensor(param):
            slots.sharded.tell_state(slot, list(tensors))
        return flushed or replaces

    def state_keys(self) -> tuple[str, ...]:
        rule = self._rule
        return (*rule.state, *rule.counters, *(("step",) if rule.counts_steps else ()))

    def changed_option(self, then: int, group: dict[str, Any], number: int) -> str | None:
        if number >= 0:
            return self._rule.options[number].partition(".")[0]
        return self._scalars.changed_option(then, group)

    def step_one(self, optimizer: Optimizer, slots: Slots, slot: int) -> None:
        lib_with_gil.of_shim_ledger_step_slot(self._plan, optimizer, slot)

    def begin(self, optimizer: Optimizer, slots: Slots, in_backward: bool) -> bool:
        """A scale that was set by hand is obeyed in step(): on a GPU by kernels, else by the
        class's own step(), if at all."""
        if not self._rule.scales or not has_scale(optimizer):
            return True
        if in_backward:
            return False
        if self.is_unconfirmed():
            if guard("late_scale"):
                raise Error(_LATE_SCALE)
            return True
        groups = optimizer.param_groups
        return all(g.get("fused") and all(is_gpu(p.device) for p in g["params"]) for g in groups)

    def take_step(self, optimizer: Optimizer) -> None:
        super().take_step(optimizer)
        lib_with_gil.of_shim_ledger_forget_state(self._plan)

    def prepare(self, optimizer: Optimizer, same_groups: bool) -> bool:
        self._mixed.try_new(optimizer)
        return self._scalars.tell(optimizer, same_groups)


def _bring_to_cpu(entry: Entry, names: tuple[str, ...]) -> None:
    """load_state_dict() moves counters to their parameter."""
    for name in names:
        if is_on_gpu(entry.get(name)):
            entry[name] = entry[name].cpu()


def _countable(step: Any, param: Tensor) -> bool:
    if not isinstance(step, Tensor) or step.dim() != 0:
        return False
    if step.device.type == "cpu":
        return step.dtype in (torch.float32, torch.float64)
    return is_gpu(step.device) and step.device == param.device and step.dtype == torch.float32
