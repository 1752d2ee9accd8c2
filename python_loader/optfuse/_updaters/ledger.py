# SPDX-License-Identifier: BSD-3-Clause
"""The Python side of an optimizer's ledger (shim/ledger): tells the library of parameters, options
and state, where the ledger finds other objects than before.

The optimizer stays the owner of everything a user can see: load_state_dict, schedulers, resume
and users replace what is in param_groups and state."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.optim import Optimizer

from optfuse import _shared_state
from optfuse._backward import loss_scale
from optfuse._dtensor.local_tensors import is_dtensor
from optfuse._late import Used
from optfuse._library import bindings
from optfuse._library.bindings import BACKWARD, Error, Trait, check, guard, lib, lib_with_gil
from optfuse._patches.profiling import has_hooks_before
from optfuse._rules import Group
from optfuse._trials.stock_trial import flags_of
from optfuse._updaters import hand_set_scale, saved_tensors
from optfuse._updaters.choice import updater_class
from optfuse._updaters.slots import Slots, Tensors
from optfuse._updaters.updater import Entry, OfPlan

ledgers: weakref.WeakValueDictionary[int, Ledger] = weakref.WeakValueDictionary()
_CONSTANT = {bool, int, float, complex, str, type(None)}
_FLAGS = (
    "optfuse: foreach, capturable or fused of a parameter group was changed after fuse(), or its "
    "lr has become a tensor or its alpha negative: its step() would now go another way, whose bits "
    "the kernels on the GPU do not have. Call optfuse.unfuse() and fuse it again"
)
_LATE_SCALE = (
    "optfuse: grad_scale or found_inf of the optimizer was set after backward() had made updates "
    "without it. Set both to None and call step(), which confirms these; set them before "
    'backward(), or use mode="forward"'
)


def _ask(ledger: Ledger, name: str, optimizer: Optimizer, *arguments: Any) -> Any:
    return getattr(ledger, name)(optimizer, *arguments)


_ask_untraced = torch._dynamo.disable(_ask)


class Ledger:
    """One plan's. Does not keep the optimizer alive."""

    marked = False  # tensors may carry the pending mark
    scaled_steps = 0  # with a scale that was set by hand
    # Objects whose addresses the library compares: they live as long as it does.
    kept_params: Iterable[Any] = ()
    kept_options: Iterable[Any] = ()
    kept_entries: Iterable[Any] = ()
    kept_values: Iterable[Any] = ()

    def __init__(
        self, of_plan: OfPlan, free: weakref.finalize[..., Optimizer], optimizer: Optimizer
    ) -> None:
        """free: frees the plan when the optimizer dies."""
        self.plan = of_plan.plan
        self._free = free
        self._wanted = of_plan.options
        self.mode = self._wanted.mode
        self.rule = of_plan.rule
        self._stock = of_plan.stock
        self.slots = Slots(self.plan, [])
        self._flags: list[tuple[Any, ...]] = []  # of each group, when it was fused
        self._tried: Iterable[Tensor] = ()
        self.order = _shared_state.Order()
        self.used = Used()
        self._then: tuple[Any, dict[int, Entry]] = (None, {})  # of kept_entries
        self.updater = updater_class(self.rule)(of_plan)
        ledgers[self.plan] = self
        _shared_state.fused[id(optimizer)] = optimizer
        known = weakref.ref(optimizer), weakref.ref(self)
        lib_with_gil.of_shim_ledger_open(self.plan, *known, loss_scale.running)

    @torch._dynamo.disable(recursive=False)  # type: ignore[untyped-decorator]
    def ask(self, name: str, optimizer: Optimizer, *arguments: Any) -> Any:
        """Calls a method for the library, perhaps in a pass that is compiled: dynamo would trace
        what runs here, and to leave it alone takes microseconds."""
        ask = _ask if get_eval_frame_callback() is None else _ask_untraced
        return ask(self, name, optimizer, *arguments)

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

    # ---- parameters

    def rebuild(self, optimizer: Optimizer, tried: Iterable[Tensor] = ()) -> None:
        """Tells the library about all parameters and groups from the start. If it fails the next
        step does it again. tried: those that are new, and that fuse() or add_param_group() has
        looked at."""
        self._tried = tried
        lib_with_gil.of_shim_ledger_rebuild(self.plan, optimizer)

    def check_rebuild(self, optimizer: Optimizer) -> None:
        self.refuse_in_backward("a change of param_groups")
        self.updater.clear(optimizer, self.slots.params)

    def tell_params(self, optimizer: Optimizer) -> int:
        """Returns the plan's traits."""
        tried, self._tried = self._tried, ()
        groups = optimizer.param_groups
        slots = Slots(self.plan, groups)
        if self.updater.is_tried():
            slots.find_places(self.slots, tried)
        used = self.slots.used()
        check(lib.of_shim_clear(self.plan))
        if self.mode == BACKWARD:
            self.slots.detach(kept=set(map(id, slots.params)))
        self._flags += map(flags_of, groups[len(self._flags) :])
        lib_with_gil.of_shim_ledger_tell_options(self.plan, optimizer)
        slots.tell(self._alone(slots), used, self.updater.tried_on_cpu())
        self._tell_reduced(slots)
        self.slots = slots
        self.updater.layout(groups)
        if self.mode == BACKWARD:
            slots.attach()
        if self.updater.is_unconfirmed():
            self.updater.take_over(optimizer)
        else:
            self.adopt_state(optimizer)
        return self._traits()

    def _traits(self) -> int:
        reads_scale = self.rule.scales or self.rule.reads_scale
        sharded = self.slots.sharded is not None
        traits = {
            Trait.ASKS: self.updater.asks or sharded,
            Trait.COUNTS_TOGETHER: self.updater.counts_together,
            Trait.READS_SCALE: reads_scale,
            Trait.COUNTS_PASSES: self._wanted.accumulate != 1,
            Trait.IS_SHARDED: sharded,
        }
        return sum(trait for trait, is_so in traits.items() if is_so)

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

    def refuse_in_backward(self, what: str) -> None:
        if self.mode == BACKWARD and torch._C._current_graph_task_id() != -1:
            raise Error(
                f"optfuse: {what} inside backward(), while backward fusion is updating "
                "parameters; do it before or after"
            )

    def are_replaced(self, optimizer: Optimizer) -> bool:
        return self.slots.sharded is not None and self.slots.sharded.are_replaced()

    def attach(self, optimizer: Optimizer) -> None:
        self.slots.attach()

    # ---- options and state

    def numbers(self, optimizer: Optimizer, number: int) -> tuple[float, ...]:
        """Whether a group could not get other options without another object in it, and its
        options in the library's order. The class's own step() takes over all each time."""
        group = optimizer.param_groups[number]
        if self.rule.as_made and self._flags[number : number + 1] not in ([], [flags_of(group)]):
            raise Error(_FLAGS)
        return _is_constant(group), *self.rule.hyper(group)

    def tell_state(self, optimizer: Optimizer) -> bool:
        """Whether prepare() has something to do."""
        state: dict[Tensor, Entry] = optimizer.__dict__["state"]
        flushed = False
        self.leaves_state(optimizer)
        if not self.updater.tells_state:
            return False
        for slot, param in enumerate(self.slots.params):
            flushed = self.updater.tell_entry(self.slots, slot, state.get(param), False, flushed)
        shared = self.slots.sharing()
        self.order.look(self, shared, self._others() if shared else ())
        if not self.updater.may_share_state:
            _shared_state.refuse_twice(self, shared)
        return self.order.is_open() or self.updater.is_untried

    def keep_state(self, optimizer: Optimizer) -> None:
        """Keeps the entries of a state that is no dict, which the library can't read."""
        self.kept_entries, self.kept_values = entries, values = [], []
        for param, entry in optimizer.__dict__["state"].items():
            entries += param, entry
            items = entry.items() if isinstance(entry, Mapping) else ()
            values += (*chain.from_iterable(items), None)
        entries.append(None)

    def _others(self) -> list[Ledger]:
        return [ledger for ledger in list(ledgers.values()) if ledger is not self]

    def adopt_state(self, optimizer: Optimizer) -> None:
        """Takes the state over now where another optimizer may have its tensors: that one must
        know before the next backward pass."""
        if not any(BACKWARD in (self.mode, other.mode) for other in self._others()):
            return
        try:
            bindings.flush(self.plan)
            self.tell_state(optimizer)
        except Error:
            pass  # the next step says so
        lib_with_gil.of_shim_ledger_know_state(self.plan, optimizer, False)

    def leaves_state(self, optimizer: Optimizer) -> bool:
        """In backward mode: whether missing state is left to step(), as a hook may make it."""
        left = self.mode == BACKWARD and has_hooks_before(optimizer)
        lib.of_shim_leave_stateless(self.plan, left)
        return left

    def make_entry(self, optimizer: Optimizer, slot: int) -> bool:
        """As stock does at a parameter's first gradient. Whether the state had no entry."""
        param, state = self.slots.params[slot], optimizer.state
        is_new, is_absent = not state.get(param), param not in state
        try:
            self.updater.make_entry(optimizer, self.slots, slot)
            self.updater.tell_entry(self.slots, slot, state[param], True, False)
        except BaseException:
            if is_new:  # the library may not know that it is fresh
                state.pop(param, None)
            raise
        if self.mode == BACKWARD:
            self.used.make(slot, state[param], is_over=False)
        return is_absent

    def note_update(self, slot: int, entry: Entry, is_absent: bool) -> None:
        """An update of backward mode has run through an entry of the state."""
        self.used.make(slot, entry, is_over=True)
        lib_with_gil.of_shim_ledger_note_entry(self.plan, slot, is_absent)

    def move_to_end(self, optimizer: Optimizer, slot: int) -> None:
        """Stock's step() inserts new entries of the state in the order of the parameters."""
        state, param = optimizer.__dict__["state"], self.slots.params[slot]
        if param in state:
            state[param] = state.pop(param)

    # ---- a step, or the beginning of a backward pass that updates

    def check_pass(self, optimizer: Optimizer, only_adds: bool) -> None:
        if self._wanted.accumulate != 1:
            loss_scale.refuse_nested()
        if not only_adds:
            loss_scale.refuse_if_scaled()

    def begin(self, optimizer: Optimizer, in_backward: bool, same_state: bool) -> bool:
        sharded = None if in_backward else self.slots.sharded
        if sharded is not None:
            sharded.follow()
            sharded.lend()
        updates = False
        try:
            updates = self._begin(optimizer, in_backward, same_state)
        finally:
            if sharded is not None and not updates:
                sharded.take_back(True)
        return updates

    def _begin(self, optimizer: Optimizer, in_backward: bool, same_state: bool) -> bool:
        hand_set_scale.refuse_without_fused(optimizer, self.rule)
        if not in_backward and hand_set_scale.has_scale(optimizer, self.rule):
            if not self.updater.is_unconfirmed():
                self._step_scaled(optimizer)
                return False
            if guard("late_scale"):
                raise Error(_LATE_SCALE)
        if self.updater.begin(optimizer, self.slots, in_backward, bool(same_state)):
            return True
        if not in_backward:
            self._leave(optimizer)
            self.updater.take_step(optimizer)
            lib.of_shim_restart_count(self.plan)
        return False

    def _leave(self, optimizer: Optimizer) -> None:
        """Before the class's own step(), of which the library knows nothing."""
        bindings.flush(self.plan)
        self.adopt_state(optimizer)
        self.order.check()

    def _step_scaled(self, optimizer: Optimizer) -> None:
        """With a scale that was set by hand; backward fusion has left all gradients to it."""
        self.scaled_steps += 1
        self._leave(optimizer)
        hand_set_scale.step_with_scale(optimizer, self._stock, self.rule)
        lib_with_gil.of_shim_ledger_know_state(self.plan, optimizer, False)
        lib.of_shim_restart_count(self.plan)

    look_at_modes = staticmethod(saved_tensors.tell_of_writes)

    def prepare(self, optimizer: Optimizer, same_groups: bool, in_backward: bool) -> bool:
        """After options and state were told. Whether the next step has something to do here."""
        again = self.updater.prepare(optimizer, bool(same_groups))
        if not in_backward:
            self.order.check()
        return again or self.order.is_open()

    def end(self, optimizer: Optimizer, done: bool) -> None:
        """The updates of this step are certain; not done: it failed."""
        if self.slots.sharded is not None:
            self.slots.sharded.take_back(bool(done))
        self.updater.end(optimizer, self.slots, bool(done))

    # ---- changes between backward() and step(), where stock would still obey them

    def note_used(self, optimizer: Optimizer) -> None:
        self.used.begin(optimizer)

    def confirmed(self, optimizer: Optimizer) -> None:
        self.used.made = {}

    def changed_attribute(self, optimizer: Optimizer) -> str:
        name = self.updater.changed_attribute(optimizer)
        if name is not None:
            return f"the optimizer's attribute {name!r}, which its step() may read, was changed"
        name = self.used.changed_scale(optimizer) if self.rule.reads_scale else None
        if name is None:
            return ""
        updated = (s for s in range(len(self.slots)) if lib.of_shim_is_updated(self.plan, s))
        user = self.label(next(updated, 0))
        return f"the optimizer's attribute {name!r}, which {user} depends on, was changed"

    def changed_option(self, optimizer: Optimizer, then: int, now: int, number: int) -> str:
        """The name of the first option in which group `now` differs from what updates of group
        `then` used. number: of an option in the library's order; -1: those are the same."""
        return self.updater.changed_option(then, optimizer.param_groups[now], number) or ""

    def changed_state(self, optimizer: Optimizer, slot: int) -> str:
        param, now = self.slots.params[slot], optimizer.__dict__["state"]
        if self._then[0] is not self.kept_entries:
            self._then = self.kept_entries, dict(self._entries())
        then = self._then[1].get(id(param), {})
        keys = self.updater.state_keys()
        change = self.used.changed_entry(slot, then, now.get(param, {}), keys)
        return "" if change is None else change.format(self.label(slot))

    def _entries(self) -> Iterator[tuple[int, Entry]]:
        """The state's entries by the ids of their keys, as the library has seen them last."""
        values = iter(self.kept_values)
        keys = iter(self.kept_entries)
        for key in keys:
            if key is None:
                return
            next(keys)
            entry = {}
            while (name := next(values)) is not None:
                entry[name] = next(values)
            yield id(key), entry


def _is_constant(group: Group) -> bool:
    return type(group["params"]) is list and all(map(_is_constant_entry, group, group.values()))


def _is_constant_entry(name: str, value: Any) -> bool:
    kind = type(value)
    if kind is tuple:
        return _CONSTANT.issuperset(map(type, value))
    return kind in _CONSTANT or name in ("params", "param_names")
