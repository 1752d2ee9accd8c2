# SPDX-License-Identifier: BSD-3-Clause
"""The ledger of an optimizer: its parameters, options and state as the library was told of them.

The optimizer stays the owner of everything a user can see: param_groups and
state are read again at every step, because load_state_dict, schedulers, resume
and users replace what is in them. Most steps find nothing changed; the checks
below are written to find that out quickly."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse import _shared_state
from optfuse._dtensor.local_tensors import is_dtensor
from optfuse._late import Told, Used
from optfuse._library import bindings
from optfuse._library.bindings import BACKWARD, Error, check, guard, lib
from optfuse._options import Options
from optfuse._own_step.settings import Promise
from optfuse._rules import Rule
from optfuse._snapshot import Groups, State, StateSnapshot
from optfuse._updaters.choice import updater_for
from optfuse._updaters.options import ToldOptions
from optfuse._updaters.slots import Slots, Tensors

ledgers: weakref.WeakValueDictionary[int, Ledger] = weakref.WeakValueDictionary()


class Ledger:
    """One plan's. Does not keep the optimizer alive."""

    def __init__(
        self,
        plan: int,
        free: weakref.finalize[..., Optimizer],
        options: Options,
        rule: Rule,
        stock: type[Optimizer],
        promise: Promise | None,
    ) -> None:
        """free: frees the plan when the optimizer dies. promise: as promise_of() says."""
        self.plan = plan
        self._free = free
        self._wanted = options
        self.mode = options.mode
        self.rule = rule
        # What the library is told inside backward, by one thread at a time.
        self.telling = threading.RLock()
        self.slots = Slots(plan, [])
        self.options = ToldOptions(plan, rule)
        self.state = StateSnapshot()
        self.order = _shared_state.Order()
        self.used = Used()  # backward mode: by the updates since step()
        self.updater = updater_for(stock, self.options, promise, self.mode == BACKWARD)
        ledgers[plan] = self

    def close(self) -> None:
        """The plan is about to be freed."""
        ledgers.pop(self.plan, None)

    # ---- for other ledgers

    @property
    def slot_states(self) -> list[Tensors | None]:
        return self.slots.states

    def label(self, slot: int) -> str:
        return self.slots.labels[slot]

    def is_ahead(self, slot: int) -> bool:
        """Whether backward fusion has updated a parameter; of programs, which have the counters
        of all their parameters in them, any."""
        alive = self._free.peek()  # keeps the optimizer and so the plan meanwhile
        if alive is None:
            return False
        if self.updater.counts_together:
            return lib.of_shim_unconfirmed(self.plan)  # type: ignore[no-any-return]
        return lib.of_shim_is_updated(self.plan, slot)  # type: ignore[no-any-return]

    def is_unconfirmed(self) -> bool:
        """Whether backward fusion has made updates that no step() has confirmed."""
        return self.mode == BACKWARD and lib.of_shim_unconfirmed(self.plan)

    # ---- parameters and groups

    def rebuild(self, optimizer: Optimizer, tried: Iterable[Tensor] = ()) -> None:
        """Tells the library about all parameters and groups from the start. If
        it fails the next sync_params() does it again. tried: those that are new, and that
        fuse() or add_param_group() has looked at."""
        self.refuse_in_backward("a change of param_groups")
        is_late = self.is_unconfirmed()
        self.updater.clear(optimizer, self.slots.params)
        if is_late:
            self.used.keep_changes(self._told, self, optimizer)
        groups = optimizer.param_groups
        slots = Slots(self.plan, groups)
        if self.updater.is_tried():
            slots.find_places(self.slots, tried)
        updated = self.slots.updated()
        self.options.snapshot.forget()
        check(lib.of_shim_clear(self.plan))
        if self.mode == BACKWARD:
            self.slots.detach(kept=set(map(id, slots.params)))
        self.options.tell_all(groups)
        slots.tell(self._alone(slots), updated, self.updater.tried_on_cpu())
        self._tell_reduced(slots)
        slots.find_sharded()
        self.slots = slots
        self._told = self._all_told()
        self.options.snapshot.remember_params(groups)
        self.state.forget()
        self.updater.layout(groups)
        if self.mode == BACKWARD:
            slots.attach()
        self.adopt_state(optimizer, is_late)
        if is_late:
            self.used.begin(optimizer, State(optimizer.__dict__["state"]))
            self.updater.take_over(optimizer)

    def _alone(self, slots: Slots) -> set[int]:
        """The ids of parameters whose updates are never left pending."""
        late = self.mode == BACKWARD  # a gradient has become a consumed one by then
        sharded = slots.params if late else ()
        return {*map(id, self._wanted.eager), *map(id, filter(is_dtensor, sharded))}

    def _tell_reduced(self, slots: Slots) -> None:
        reduction = self._wanted.reduction
        if reduction is not None and self.mode == BACKWARD:
            reduced = [i for i, p in enumerate(slots.params) if reduction.takes(p)]
            torch.ops.optfuse.set_reduced(self.plan, reduced)

    def _all_told(self) -> Told:
        slots, updater = self.slots, self.updater
        of_slots = slots.params, slots.labels, slots.group_of
        keys = updater.state_keys()
        return Told(self.plan, *of_slots, updater.counts_together, self.rule.reads_scale, keys)

    def refuse_in_backward(self, what: str) -> None:
        if self.mode == BACKWARD and torch._C._current_graph_task_id() != -1:
            raise Error(
                f"optfuse: {what} inside backward(), while backward fusion is updating "
                "parameters; do it before or after"
            )

    def sync_params(self, optimizer: Optimizer) -> None:
        """Programs have counters in them, which step() advances for the parameters they are for."""
        if self.updater.counts_together and self.is_unconfirmed():
            return
        if not self.have_same_params(optimizer.param_groups):
            self.rebuild(optimizer)

    def knows(self, *tensors: Tensor) -> bool:
        """Whether one of them is a parameter."""
        return any(tensor is param for tensor in tensors for param in self.slots.params)

    def have_same_params(self, groups: Groups) -> bool:
        return self.options.snapshot.have_same_params(groups)

    def are_same(self, groups: Groups) -> bool:
        """Whether the parameters and options of which step() tells the library are as told."""
        return self.updater.are_same(self.options.snapshot, groups)

    # ---- options and state

    def sync_inputs(self, optimizer: Optimizer, same_groups: bool) -> None:
        """Tells the library which options and state have changed, for updates from here on."""
        state = optimizer.__dict__["state"]
        if not same_groups:
            self.options.tell(optimizer.param_groups)
        if not self.state.is_same(state):
            self._sync_state(state)

    def _sync_state(self, state: dict[Tensor, dict[str, Any]]) -> None:
        flushed = False
        for slot, param in enumerate(self.slots.params):
            flushed = self.updater.tell_entry(self.slots, slot, state.get(param), False, flushed)
        shared = self.slots.sharing()
        self.order.look(self, shared, self._others() if shared else ())
        if not self.updater.may_share_state:
            _shared_state.refuse_twice(self, shared)
        self.state.remember(state)

    def _others(self) -> list[Ledger]:
        return [ledger for ledger in list(ledgers.values()) if ledger is not self]

    def adopt_state(self, optimizer: Optimizer, is_late: bool = False) -> None:
        """Takes the state over now where another optimizer may have its tensors: that one must
        know before the next backward pass. is_late: between backward() and step(), where it must
        be known who writes to it."""
        if not is_late and not any(BACKWARD in (self.mode, other.mode) for other in self._others()):
            return
        try:
            bindings.flush(self.plan)
            self._sync_state(optimizer.__dict__["state"])
        except Error:
            pass  # the next step says so
        self.state.forget()  # the programs of a traced class are for the state before

    def make_state(self, optimizer: Optimizer, slots: list[int]) -> None:
        """As stock does at a parameter's first gradient."""
        flushed = False
        with self.telling:
            self.state.forget()  # the next sync looks at all of it once
            for slot in slots:
                flushed = self._make_entry(optimizer, slot, flushed)

    def _make_entry(self, optimizer: Optimizer, slot: int, flushed: bool) -> bool:
        param, state = self.slots.params[slot], optimizer.state
        is_new, is_absent = not state.get(param), param not in state
        try:
            self.updater.make_entry(optimizer, self.slots, slot)
            flushed = self.updater.tell_entry(self.slots, slot, state[param], True, flushed)
        except BaseException:
            if is_new:  # the library may not know that it is fresh
                state.pop(param, None)
            raise
        if self.mode == BACKWARD:
            self.used.make(param, state[param], is_absent, is_over=False)
        return flushed

    # ---- changes between backward() and step(), where stock would still obey them

    def refuse_late_change(
        self, optimizer: Optimizer, same_groups: bool, at_step: bool = False
    ) -> None:
        if self.used.has_begun and lib.of_shim_unconfirmed(self.plan) and guard("late"):
            self.used.refuse_changes(self._told, self, optimizer, same_groups, at_step)

    def changed_option(self, number: int, group: dict[str, Any]) -> str | None:
        return self.updater.changed_option(number, group)

    def changed_attribute(self, optimizer: Optimizer) -> str | None:
        return self.updater.changed_attribute(optimizer)
