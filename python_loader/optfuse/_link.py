# SPDX-License-Identifier: BSD-3-Clause
"""The join of one fused optimizer to its plan in the library (shim/ledger): step(), backward
passes, launches, and what the library asks where it finds other objects than before. How updates
are made, the link's updater knows.

The optimizer stays the owner of everything a user can see: load_state_dict, schedulers, resume
and users replace what is in param_groups and state."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.optim import Optimizer

from optfuse._backward import consumed_gradients, loss_scale
from optfuse._class_code import patched
from optfuse._dtensor.local_tensors import is_dtensor, local_of
from optfuse._gpu import is_gpu
from optfuse._late import Used
from optfuse._library import bindings
from optfuse._library.bindings import (
    BACKWARD,
    FINAL,
    FORWARD,
    LEFT,
    Error,
    Trait,
    check,
    lib,
    lib_with_gil,
)
from optfuse._options import FORCED, LINK, OFF, Delayed, Options
from optfuse._patches import compiled, cuda_graphs
from optfuse._patches.profiling import has_hooks_before
from optfuse._rules import AnyRule, Group, RecordedRule, RegisteredRule, Rule
from optfuse._trials.stock_trial import flags_of
from optfuse._updaters import saved_tensors, shared_state
from optfuse._updaters.alone import Alone
from optfuse._updaters.kernels import Kernels
from optfuse._updaters.recorded import Recorded
from optfuse._updaters.registered import Registered, free_plan
from optfuse._updaters.slots import Slots, params_of
from optfuse._updaters.updater import NONE_PATCHED, Entry, OfPlan, Updater

links: weakref.WeakValueDictionary[int, Link] = weakref.WeakValueDictionary()
_UPDATERS: dict[type[Rule], type[Updater]] = {RecordedRule: Recorded, RegisteredRule: Registered}
_CONSTANT = {bool, int, float, complex, str, type(None)}
_FLAGS = (
    "optfuse: foreach, capturable or fused of a parameter group was changed after fuse(), or its "
    "lr has become a tensor or its alpha negative: its step() would now go another way, whose bits "
    "the kernels on the GPU do not have. Call optfuse.unfuse() and fuse it again"
)


def link_of(optimizer: Optimizer) -> Link:
    return optimizer.__dict__[LINK]  # type: ignore[no-any-return]


def _ask(link: Link, name: str, optimizer: Optimizer, *arguments: Any) -> Any:
    return getattr(link, name)(optimizer, *arguments)


_ask_untraced = torch._dynamo.disable(_ask)


class Link:
    """Owned by the optimizer; frees the plan when the optimizer dies."""

    gpu_bits_differ: tuple[str, ...] = ()
    compiled = False  # compiled code stopped the deferring
    unasked: Callable[[], None] | None = None  # run fused it: whom to tell
    delayed: Delayed | None = None  # parameters whose updates arrive late
    marked = False  # tensors may carry the pending mark
    # Objects whose addresses the library compares: they live as long as the link.
    kept_params: Iterable[Any] = ()
    kept_options: Iterable[Any] = ()
    kept_entries: Iterable[Any] = ()
    kept_values: Iterable[Any] = ()
    has_stepped = False  # final mode: a pass has ended since step()

    def __init__(
        self,
        optimizer: Optimizer,
        options: Options,
        rule: Rule,
        methods: Mapping[str, Callable[..., Any]] = NONE_PATCHED,
    ) -> None:
        """methods: that were put into the object in the place of its class's."""
        self.stock = type(optimizer)
        self.rule = rule
        self.options = options
        self.mode = options.mode
        self.max_grad_norm = options.max_grad_norm
        self.saved: dict[str, Any] = {}  # attributes that unfuse() puts back
        self.alone = threading.RLock()  # in one step() at a time, from clipping to delayed updates
        self.plan = _new_plan(rule, options)
        self.kept = weakref.ref(optimizer)  # the optimizer, if it still exists
        self._free = weakref.finalize(optimizer, free_plan, self.plan)
        self._free.atexit = False  # at exit nothing is launched
        self.slots = Slots(self.plan, [])
        self._flags: list[tuple[Any, ...]] = []  # of each group, when it was fused
        self._tried: Iterable[Tensor] = ()
        self._kept_by_slot: list[Any] = []
        self._used = Used()
        self._then: tuple[Any, dict[int, Entry]] = (None, {})  # of kept_entries
        if options.reduction is not None:
            options.reduction.add(self)
        try:
            of_plan = OfPlan(self.plan, self.stock, rule, options, methods)
            self.updater = _updater_for(rule, self.mode)(of_plan)
            links[self.plan] = self
            shared_state.fused[id(optimizer)] = optimizer
            known = self.kept, weakref.ref(self), loss_scale.running
            lib_with_gil.of_shim_ledger_open(self.plan, *known)
            self.rebuild(optimizer, chain.from_iterable(map(params_of, optimizer.param_groups)))
        except BaseException:
            self._free()
            raise

    def close(self) -> None:
        """Launches what is pending and gives the parameters back."""
        self._refuse_in_backward("unfuse()")
        self.flush()
        if self.delayed is not None:
            self.delayed.close()
        if self.mode != FORWARD:
            self.slots.detach()
        if self.mode == BACKWARD:
            self._drop_consumed()
        links.pop(self.plan, None)
        self._free()

    def _drop_consumed(self) -> None:
        """Nobody can read what the updates have used up. What step() has not confirmed stays: at
        such a gradient stock's step() raises. So does that of a parameter that has left the
        optimizer: stock adds to it, since no zero_grad() takes it away."""
        groups = getattr(self.kept(), "param_groups", ())
        there = set(map(id, chain.from_iterable(map(params_of, groups))))
        params = enumerate(self.slots.params)
        confirmed = [p for slot, p in params if id(p) in there and not self.is_ahead(slot)]
        consumed_gradients.drop([*confirmed, *map(local_of, confirmed)])

    def _refuse_in_backward(self, what: str) -> None:
        if self.mode != FORWARD and _is_in_backward():
            raise Error(
                f"optfuse: {what} inside backward(), while backward fusion is updating "
                "parameters; do it before or after"
            )

    def slot_of(self, param: Tensor) -> int | None:
        return self.slots.number_of(param) if self._free.alive else None

    def label(self, slot: int) -> str:
        return self.slots.labels[slot]

    def is_ahead(self, slot: int) -> bool:
        """Whether backward fusion has updated a parameter, and step() has not confirmed that."""
        alive = self._free.peek()  # keeps the optimizer and so the plan meanwhile
        return alive is not None and self.updater.is_ahead(slot)

    # ---- what the library does

    def rebuild(self, optimizer: Optimizer, tried: Iterable[Tensor] = ()) -> None:
        """Tells the library about all parameters and groups from the start. If it fails the next
        step does it again. tried: those that are new, and that fuse() or add_param_group() has
        looked at."""
        self._tried = tried
        lib_with_gil.of_shim_ledger_rebuild(self.plan, optimizer)

    def step(self, optimizer: Optimizer, unless_watched: bool = False) -> bool:
        """False: nothing was done, since an observer of PyTorch's functions is at work."""
        self.marked = True
        done = lib_with_gil.of_shim_ledger_step(self.plan, optimizer, unless_watched)
        if done == LEFT:
            return False
        if compiled.running() or cuda_graphs.replays_are_unseen():
            self.flush()
            lib.of_shim_keep_promises()
        return True

    def drop_gradients(self, optimizer: Optimizer, may_drop: bool) -> bool:
        """For zero_grad(). False: they are still there."""
        done = lib_with_gil.of_shim_ledger_zero_grad(self.plan, optimizer, may_drop)
        return done != LEFT  # type: ignore[no-any-return]

    def add_only(self, entered: int) -> None:
        """Enters (+1) or leaves (-1) a context whose passes only add."""
        if self._free.alive:
            lib.of_shim_add_only(self.plan, entered)

    def flush(self, drain: bool = False) -> None:
        """Launches what is pending and takes the mark off every tensor but gradients, and those
        that a GPU may still be working on; drain: waits for it first."""
        optimizer = self.kept()  # keeps the parameters alive meanwhile
        if optimizer is not None:
            self.marked &= not bindings.flush(self.plan, drain)

    def flush_for_compiled(self) -> None:
        """Compiled code sees no marks, and may run on any stream. On a GPU
        nothing is left pending from here on: there is little to gain by it, and
        the wait is needed this once only."""
        self.flush()
        if self.marked and any(is_gpu(param.device) for param in self.slots.params):
            self.flush(drain=True)
            lib.of_shim_stop_deferring(self.plan)
            self.compiled = True

    # ---- what it asks

    @torch._dynamo.disable(recursive=False)  # type: ignore[untyped-decorator]
    def ask(self, name: str, optimizer: Optimizer, *arguments: Any) -> Any:
        """Calls a method for the library, perhaps in a pass that is compiled: dynamo would trace
        what runs here, and to leave it alone takes microseconds."""
        ask = _ask if get_eval_frame_callback() is None else _ask_untraced
        return ask(self, name, optimizer, *arguments)

    def check_rebuild(self, optimizer: Optimizer) -> None:
        if self.mode == BACKWARD:
            self._refuse_in_backward("a change of param_groups")
        self.updater.clear(optimizer)

    def tell_params(self, optimizer: Optimizer) -> int:
        """Returns the plan's traits."""
        tried, self._tried = self._tried, ()
        groups = optimizer.param_groups
        slots = Slots(self.plan, groups)
        if self.updater.is_tried():
            slots.find_places(self.slots, tried)
        used = self.slots.used()
        check(lib.of_shim_clear(self.plan))
        self._kept_by_slot = [None] * len(slots)
        if self.mode != FORWARD:
            self.slots.detach(kept=set(map(id, slots.params)))
        self._flags += map(flags_of, groups[len(self._flags) :])
        lib_with_gil.of_shim_ledger_tell_options(self.plan, optimizer)
        slots.tell(self._alone(slots), used, self.updater.tried_on_cpu())
        self._tell_reduced(slots)
        self.slots = slots
        self.updater.layout(groups)
        if self.mode != FORWARD:
            slots.attach()
        if not self.updater.is_unconfirmed():
            self.adopt_state(optimizer)
        return self._traits()

    def _traits(self) -> int:
        sharded = self.slots.sharded is not None
        traits = {
            Trait.ASKS: self.updater.asks() or sharded,
            Trait.READS_SCALE: self.rule.scales,
            Trait.COUNTS_PASSES: self.options.accumulate != 1 or self.mode == FINAL,
            Trait.IS_SHARDED: sharded,
            Trait.BY_CLASS: self.updater.runs_alone(),
        }
        return sum(trait for trait, is_so in traits.items() if is_so)

    def _alone(self, slots: Slots) -> set[int]:
        """The ids of parameters whose updates are never left pending."""
        late = self.mode == BACKWARD  # a gradient has become a consumed one by then
        sharded = slots.params if late else ()
        return {*map(id, self.options.eager), *map(id, filter(is_dtensor, sharded))}

    def _tell_reduced(self, slots: Slots) -> None:
        reduction = self.options.reduction
        if reduction is not None and self.mode == BACKWARD:
            reduced = [i for i, p in enumerate(slots.params) if reduction.takes(p)]
            torch.ops.optfuse.set_reduced(self.plan, reduced)

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
        """False: it must be told again in step(), since another optimizer has some of it and is
        ahead, with updates that its own step() has not confirmed."""
        self.leaves_state(optimizer)
        shared = self.updater.tell_state(optimizer, self.slots)
        if not shared:
            return True
        shared_state.refuse_twice(self.slots, shared)
        others = ((other.slots, other.is_ahead) for other in self._others())
        early = shared_state.early(self.slots, shared, others)
        if early and not _is_in_backward():
            raise Error(early)
        return not early

    def tell_entry(self, optimizer: Optimizer, slot: int, kept: list[Any]) -> None:
        """The state of one parameter. kept: the objects that the library compares."""
        self._kept_by_slot[slot] = kept
        self.updater.tell_entry(optimizer, self.slots, slot)

    def keep_state(self, optimizer: Optimizer) -> None:
        """Keeps the entries of a state that is no dict, which the library can't read."""
        self.kept_entries, self.kept_values = entries, values = [], []
        for param, entry in optimizer.state.items():
            entries += param, entry
            items = entry.items() if isinstance(entry, Mapping) else ()
            values += (*chain.from_iterable(items), None)
        entries.append(None)

    def _others(self) -> list[Link]:
        return [link for link in list(links.values()) if link is not self]

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
        lib_with_gil.of_shim_ledger_forget_state(self.plan)

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
        except BaseException:
            if is_new:  # the library may not know that it is fresh
                state.pop(param, None)
            raise
        if self.mode == BACKWARD:
            self._used.make(slot, state[param], is_over=False)
        return is_absent

    def move_to_end(self, optimizer: Optimizer, slot: int) -> None:
        """Stock's step() inserts new entries of the state in the order of the parameters."""
        state, param = optimizer.state, self.slots.params[slot]
        if param in state:
            state[param] = state.pop(param)

    # ---- a step, or the beginning of a backward pass that updates

    def check_pass(self, optimizer: Optimizer, only_adds: bool) -> None:
        if self.options.accumulate != 1 and self.mode == BACKWARD:
            loss_scale.refuse_nested()
        if not only_adds:
            loss_scale.refuse_if_scaled()
        if self.mode == FINAL and "step" in patched(optimizer):
            raise Error(
                "optfuse: step() was replaced on this optimizer after fuse(), and "
                "Backward(final=True) would bypass it; call optfuse.unfuse() and fuse it again"
            )

    def begin(self, optimizer: Optimizer, in_backward: bool) -> bool:
        sharded = None if in_backward else self.slots.sharded
        if sharded is not None:
            sharded.follow()
            sharded.lend()
        updates = False
        try:
            updates = self._begin(optimizer, in_backward)
        finally:
            if sharded is not None and not updates:
                sharded.take_back(True)
        return updates

    def _begin(self, optimizer: Optimizer, in_backward: bool) -> bool:
        if self.updater.begin(optimizer, self.slots, bool(in_backward)):
            return True
        if not in_backward:
            bindings.flush(self.plan)
            self.tell_state(optimizer)
            self.updater.take_step(optimizer)
            lib.of_shim_restart_count(self.plan)
        return False

    look_at_modes = staticmethod(saved_tensors.tell_of_writes)

    def prepare(self, optimizer: Optimizer, same_groups: bool) -> bool:
        """After options and state were told. Whether the next step has something to do here."""
        return self.updater.prepare(optimizer, bool(same_groups))

    def end(self, optimizer: Optimizer, done: bool) -> None:
        """The updates of this step are certain; not done: it failed."""
        if self.slots.sharded is not None:
            self.slots.sharded.take_back(bool(done))
        self.updater.end(optimizer, self.slots, bool(done))

    def apply(self, optimizer: Optimizer, slot: int) -> None:
        """One update by the class's own step(). Under the plan's lock."""
        is_absent = self.slots.params[slot] not in optimizer.state
        entry = self.updater.apply(optimizer, slot, self.slots.params[slot])
        self._used.make(slot, entry, is_over=True)
        lib_with_gil.of_shim_ledger_note_entry(self.plan, slot, is_absent)

    def update_alone(self, optimizer: Optimizer, slot: int) -> None:
        """Final mode: one update by the class's own step()."""
        with self.alone:  # gradients of several devices are complete on as many threads
            self.updater.step_one(optimizer, self.slots, slot)

    def end_pass(self, optimizer: Optimizer) -> None:
        """Final mode: a backward pass, and what runs inside of it, has made all its updates."""
        self.has_stepped = True
        optimizer.__dict__["_opt_called"] = True  # as a scheduler's wrapper of step() does
        run_hooks(optimizer)

    def await_reduction(self, optimizer: Optimizer) -> None:
        """A backward pass ends, before its last updates."""
        if self.options.reduction is not None:
            self.options.reduction.finish()
        if self.slots.sharded is not None:
            self.slots.sharded.end_pass()

    # ---- changes between backward() and step(), where stock would still obey them

    def use_anew(self, optimizer: Optimizer) -> None:
        """A backward pass begins, or step() has confirmed what the last ones have used."""
        self._used = Used()

    def changed_attribute(self, optimizer: Optimizer) -> str:
        return self.updater.changed_attribute(optimizer, self.slots)

    def changed_option(self, optimizer: Optimizer, then: int, now: int, number: int) -> str:
        """The name of the first option in which group `now` differs from what updates of group
        `then` used. number: of an option in the library's order; -1: those are the same."""
        return self.updater.changed_option(then, optimizer.param_groups[now], number) or ""

    def changed_state(self, optimizer: Optimizer, slot: int) -> str:
        param, now = self.slots.params[slot], optimizer.state
        if self._then[0] is not self.kept_entries:
            self._then = self.kept_entries, dict(self._entries())
        then = self._then[1].get(id(param), {})
        keys = self.updater.state_keys()
        change = self._used.changed_entry(slot, then, now.get(param, {}), keys)
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


def _new_plan(rule: Rule, options: Options) -> int:
    handle = ctypes.c_void_p()
    name, isa = rule.name.encode(), os.environ.get("OPTFUSE_ISA", "").encode()
    numbers = rule.bucket_bytes(options.bucket_bytes), options.accumulate
    check(lib.of_shim_plan_new(name, options.mode, isa, *numbers, ctypes.byref(handle)))
    assert handle.value is not None
    if options.side_stream:
        lib.of_shim_update_beside(handle.value)
    if not options.fold:
        lib.of_shim_write_gradients(handle.value)
    if options.products != OFF:
        lib.of_shim_promise_gradients(handle.value, options.products == FORCED)
    return handle.value


def _updater_for(rule: Rule, mode: int) -> type[Updater]:
    if mode == FINAL and isinstance(rule, AnyRule):
        return Alone
    return _UPDATERS.get(type(rule), Kernels)


#: Those of step().
run_hooks = Optimizer.profile_hook_step(lambda _: None)


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _is_constant(group: Group) -> bool:
    return type(group["params"]) is list and all(map(_is_constant_entry, group, group.values()))


def _is_constant_entry(name: str, value: Any) -> bool:
    kind = type(value)
    if kind is tuple:
        return _CONSTANT.issuperset(map(type, value))
    return kind in _CONSTANT or name in ("params", "param_names")
