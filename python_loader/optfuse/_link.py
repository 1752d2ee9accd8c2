# SPDX-License-Identifier: BSD-3-Clause
"""What joins one fused optimizer to its plan in the library.

The optimizer stays the owner of everything a user can see: param_groups and
state are read again at every step, because load_state_dict, schedulers, resume
and users replace what is in them. Most steps find nothing changed; the checks
below are written to find that out quickly."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from itertools import chain
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from optfuse import _gpu, _shared_state
from optfuse._arguments.check import label
from optfuse._backward import consumed_gradients, loss_scale
from optfuse._dtensor.local_tensors import Sharded, check_layout, is_dtensor, local_of
from optfuse._gpu import is_gpu, is_on_gpu
from optfuse._late import Told, Used
from optfuse._library.bindings import (
    ATTACH,
    BACKWARD,
    NEEDS_STATE,
    OK,
    UPDATE,
    Error,
    check,
    guard,
    lib,
    message,
)
from optfuse._options import LINK, Options
from optfuse._own_step import hand_set_scale, updates
from optfuse._own_step.noted import Noted
from optfuse._own_step.register import check_promise
from optfuse._own_step.twin import step_of
from optfuse._patches import compiled
from optfuse._rules import OWN, Rule
from optfuse._scalars import DeviceScalars
from optfuse._snapshot import Groups, GroupsSnapshot, State, StateSnapshot, params_of
from optfuse._traced.rule import TracedRule
from optfuse._traced.standin import Untraceable
from optfuse._traced.updates import Traced
from optfuse._trials.rule_choice import rule_of, why_own_step
from optfuse._trials.stock_trial import flags_of, unknown_dtypes


class Delayed(Protocol):
    """Parameters whose updates arrive late."""

    def step(self, optimizer: Optimizer, link: Link) -> None: ...

    def drain(self) -> None: ...

    def close(self) -> None: ...

    def state(self, optimizer: Optimizer) -> dict[str, Any]: ...

    def check(self, optimizer: Optimizer, state: Mapping[str, Any] | None) -> None: ...

    def load(self, state: Mapping[str, Any] | None) -> None: ...

    def nbytes(self) -> int: ...

    def __len__(self) -> int: ...


links: weakref.WeakValueDictionary[int, Link] = weakref.WeakValueDictionary()
_State = tuple[Tensor | None, ...]
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
_UNTRACEABLE = (
    "optfuse: this step() of {} can't be traced: {}. Nothing was updated. Use "
    'optfuse.fuse(optimizer, mode="forward"), which leaves such steps to the class'
)


def link_of(optimizer: Optimizer) -> Link:
    return optimizer.__dict__[LINK]  # type: ignore[no-any-return]


class Link:
    """Owned by the optimizer; frees the plan when the optimizer dies."""

    def __init__(self, optimizer: Optimizer, options: Options, rule: Rule | None = None) -> None:
        """rule: another than the optimizer's own, for a trial of it."""
        self.stock = type(optimizer)
        self.own_step_because = () if rule else tuple(why_own_step(optimizer))
        self.rule = rule or rule_of(optimizer)
        promise = check_promise(optimizer, self.stock) if self.rule.external else None
        self.options = options
        self.mode = options.mode
        self.max_grad_norm = options.max_grad_norm
        self.saved: dict[str, Any] = {}  # attributes that unfuse() puts back
        handle = ctypes.c_void_p()
        name, isa = self.rule.name.encode(), os.environ.get("OPTFUSE_ISA", "").encode()
        numbers = options.bucket_bytes, options.accumulate
        check(lib.of_shim_plan_new(name, options.mode, isa, *numbers, ctypes.byref(handle)))
        assert handle.value is not None
        self.plan: int = handle.value
        if options.side_stream:
            lib.of_shim_update_beside(self.plan)
        self._optimizer = weakref.ref(optimizer)
        self._free = weakref.finalize(optimizer, updates.free_plan, self.plan)
        self._free.atexit = False  # at exit nothing is launched
        # What the library is told inside backward, by one thread at a time.
        self._telling = threading.RLock()
        self.marked = False  # tensors may carry the pending mark
        self.gpu_bits_differ: tuple[str, ...] = ()
        self.compiled = False  # compiled code stopped the deferring
        self.unasked: Callable[[], None] | None = None  # run fused it: whom to tell
        self.delayed: Delayed | None = None  # parameters whose updates arrive late
        self._scalars = DeviceScalars(self.plan, self.rule.scales)
        self._params: list[Tensor] = []
        self._locals: list[Tensor] = []  # what the library sees of them
        self.sharded: Sharded | None = None  # the DTensors among them
        self._order = _shared_state.Order()
        self._slots: dict[int, int] = {}  # id of a parameter -> its slot
        self._places: dict[int, int] = {}  # id of a parameter -> where its update was tried
        self._flags: list[tuple[Any, ...]] = []  # of each group
        self.snapshot = GroupsSnapshot()
        self._state_snapshot = StateSnapshot()
        self._used = Used()  # backward mode: by the updates since step()
        self._told: Told
        links[self.plan] = self
        if options.reduction is not None:
            options.reduction.add(self)
        self.own: updates.Own | None = None
        self.traced: Traced | None = None
        if isinstance(self.rule, TracedRule):
            rule, in_backward = self.rule, self.mode == BACKWARD
            self.traced = Traced(self.plan, self.stock, rule.promise, rule.made, in_backward)
        try:
            if promise is not None:
                self.own = updates.Own(self.plan, self.stock, promise, self.rule.entries)
            self.rebuild(optimizer, chain.from_iterable(map(params_of, optimizer.param_groups)))
        except BaseException:
            self._free()
            raise

    def close(self, optimizer: Optimizer) -> None:
        """Launches what is pending and gives the parameters back."""
        self._refuse_in_backward("unfuse()")
        self.flush()
        if self.delayed is not None:
            self.delayed.close()
        if self.mode == BACKWARD:
            self._detach()
            self._drop_consumed()
        links.pop(self.plan, None)
        self._free()

    def _drop_consumed(self) -> None:
        """Nobody can read what the updates have used up. What step() has not confirmed stays: at
        such a gradient stock's step() raises."""
        confirmed = [p for slot, p in enumerate(self._params) if not self.is_ahead(slot)]
        consumed_gradients.drop([*confirmed, *map(local_of, confirmed)])

    # ---- parameters and groups

    def rebuild(self, optimizer: Optimizer, tried: Iterable[Tensor] = ()) -> None:
        """Tells the library about all parameters and groups from the start. If
        it fails the next sync_params() does it again. tried: those that are new, and that
        fuse() or add_param_group() has looked at."""
        self._refuse_in_backward("a change of param_groups")
        is_late = self.mode == BACKWARD and lib.of_shim_unconfirmed(self.plan)
        if self.traced is not None:
            self._refuse_unconfirmed()
            self.traced.abandon(optimizer, self._params)
        if is_late:
            self._used.keep_changes(self._told, self, optimizer)
        groups = optimizer.param_groups
        params = list(chain.from_iterable(map(params_of, groups)))
        self._group_of = [i for i, group in enumerate(groups) for _ in group["params"]]
        labels = [label(g, i, j) for i, g in enumerate(groups) for j in range(len(g["params"]))]
        updated = {
            id(p) for i, p in enumerate(self._params) if lib.of_shim_is_updated(self.plan, i)
        }
        places = [_gpu.ANYWHERE] * len(params)
        tried_on_cpu = 0 if self.rule is OWN or self.traced else unknown_dtypes(self.rule)
        if self.rule.tried or tried_on_cpu or self.traced is not None:
            places = _gpu.places_of(params, self._places, set(map(id, tried)))
        self.snapshot.forget()
        check(lib.of_shim_clear(self.plan))
        if self.mode == BACKWARD:
            kept = set(map(id, params))
            self._detach(kept)
        self._hyper: list[tuple[float, ...]] = []
        self._flags += map(flags_of, groups[len(self._flags) :])
        self._sync_hyper(groups)
        eager = set(map(id, self.options.eager))
        locals_ = list(map(local_of, params))
        late = self.mode == BACKWARD  # a gradient has become a consumed one by then
        torch.ops.optfuse.set_slots(
            self.plan,
            locals_,
            self._group_of,
            [int(id(p) in eager or (late and is_dtensor(p))) for p in params],
            [int(id(p) in updated) for p in params],
            places,
            tried_on_cpu,
            labels,
        )
        reduction = self.options.reduction
        if reduction is not None and late:
            reduced = [i for i, p in enumerate(params) if reduction.takes(p)]
            torch.ops.optfuse.set_reduced(self.plan, reduced)
        self._params, self._locals = params, locals_
        self._find_sharded(params, labels)
        self.plain = {Tensor, Parameter}.issuperset(map(type, params))
        self._places = dict(zip(map(id, params), places, strict=True))
        self._slots = {id(p): i for i, p in enumerate(params)}
        self._labels = labels
        self._told = self._all_told()
        self.snapshot.remember_params(groups)
        self._needs = (ctypes.c_size_t * max(1, len(params)))()
        self.slot_states: list[_State | None] = [None] * len(params)
        self._state_snapshot.forget()
        if self.own is not None:
            self.own.layout(groups)
        if self.traced is not None:
            self.traced.layout(groups)
        if self.mode == BACKWARD:
            self.attach()
        self.adopt_state(optimizer, is_late)
        if is_late:
            self._used.begin(optimizer, State(optimizer.__dict__["state"]))
            if self.own is not None:
                self.own.note(optimizer)

    def attach(self) -> None:
        """Chains our gradient hook with whatever each parameter has. The
        first Python hook that a user registers later takes the place of ours;
        step() then updates that parameter itself and attaches again."""
        torch.ops.optfuse.attach(self.plan, self._locals)
        if self.sharded is not None:
            self.sharded.attach()

    def _detach(self, kept: Container[int] = ()) -> None:
        pairs = zip(self._params, self._locals, strict=True)
        torch.ops.optfuse.detach(self.plan, [local for p, local in pairs if id(p) not in kept])
        if self.sharded is not None:
            self.sharded.detach()

    def _find_sharded(self, params: list[Tensor], labels: list[str]) -> None:
        self.sharded = None
        if any(map(is_dtensor, params)):
            self.sharded = Sharded(self.plan, params, labels)

    def _refuse_in_backward(self, what: str) -> None:
        if self.mode == BACKWARD and torch._C._current_graph_task_id() != -1:
            raise Error(
                f"optfuse: {what} inside backward(), while backward fusion is updating "
                "parameters; do it before or after"
            )

    def _refuse_unconfirmed(self) -> None:
        if self.mode == BACKWARD and lib.of_shim_unconfirmed(self.plan):
            raise Error(
                "optfuse: a change of param_groups between backward() and step(): backward fusion "
                "has already updated parameters of this optimizer, whose counters step() advances; "
                "change param_groups before backward() or after step()"
            )

    def slot_of(self, param: Tensor) -> int | None:
        return self._slots.get(id(param)) if self._free.alive else None

    def label(self, slot: int) -> str:
        return self._labels[slot]

    def knows(self, tensor: Tensor) -> bool:
        return any(tensor is param for param in self._params)

    def _sync_hyper(self, groups: Groups) -> None:
        hyper_of = self.rule.hyper
        known = self._hyper
        if self.rule.as_made and list(map(flags_of, groups)) != self._flags[: len(groups)]:
            raise Error(_FLAGS)
        self.snapshot.forget_options()  # half of them are told if this fails
        for i, group in enumerate(groups):
            hyper = hyper_of(group)
            if i < len(known) and known[i] == hyper:
                continue
            values = (ctypes.c_double * len(hyper))(*hyper)
            check(lib.of_shim_group(self.plan, i, values, len(hyper)))
            known[i : i + 1] = [hyper]
        if self.own is None:
            self.snapshot.remember(groups)

    # ---- optimizer state

    def _sync_state(self, state: dict[Tensor, dict[str, Any]]) -> None:
        flushed = False
        for slot, param in enumerate(self._params):
            if self.own is not None:
                self._set_own_state(slot, self.own.take_state(slot, state.get(param)))
            else:
                flushed = self._set_state(slot, state.get(param, {}), False, flushed)
        shared = self._sharing()
        self._order.look(self, shared, self._others() if shared else ())
        if self.own is None:
            _shared_state.refuse_twice(self, shared)
        self._state_snapshot.remember(state)

    def _sharing(self) -> list[int]:
        """The slots whose state others hold, too."""
        slots = (ctypes.c_size_t * len(self._params))()
        n = lib.of_shim_sharing_state(self.plan, slots, len(slots))
        return slots[:n]

    def _others(self) -> list[Link]:
        return [link for link in list(links.values()) if link is not self]

    def is_ahead(self, slot: int) -> bool:
        """Whether backward fusion has updated a parameter; of programs, which have the counters
        of all their parameters in them, any."""
        optimizer = self._optimizer()  # keeps the plan alive meanwhile
        if optimizer is None or not self._free.alive:
            return False
        if self.traced is not None:
            return lib.of_shim_unconfirmed(self.plan)  # type: ignore[no-any-return]
        return lib.of_shim_is_updated(self.plan, slot)  # type: ignore[no-any-return]

    def adopt_state(self, optimizer: Optimizer, is_late: bool = False) -> None:
        """Takes the state over now where another optimizer may have its tensors: that one must
        know before the next backward pass. is_late: between backward() and step(), where it must
        be known who writes to it."""
        if not is_late and not any(BACKWARD in (self.mode, other.mode) for other in self._others()):
            return
        try:
            self._flush(drain=False)
            self._sync_state(optimizer.__dict__["state"])
        except Error:
            pass  # the next step says so
        self._state_snapshot.forget()  # the programs of a traced class are for the state before

    def _set_own_state(self, slot: int, tensors: list[Tensor | None]) -> None:
        known = self.slot_states[slot]
        if known is None or len(known) != len(tensors) or not all(map(is_, known, tensors)):
            torch.ops.optfuse.set_state(self.plan, slot, tensors, None, False)
            self.slot_states[slot] = tuple(tensors)

    def _set_state(self, slot: int, entry: dict[str, Any], fresh: bool, flushed: bool) -> bool:
        """Whether the plan is flushed now. Once does for many slots: a flush
        looks at every slot, and nothing becomes pending before the next step."""
        moved = self.rule.as_made and not self.rule.counts_on_gpu
        for name in self.rule.counters if moved else ():
            if is_on_gpu(entry.get(name)):  # load_state_dict() moves it to its parameter
                entry[name] = entry[name].cpu()
        names = self.rule.state if self.traced is None else self.traced.state_names()
        tensors: _State = tuple(map(entry.get, (*names, *self.rule.counters)))
        step = entry.get("step") if self.rule.counts_steps else None
        others = [] if self.traced is None else self.traced.counters_of(entry)
        known, now = self.slot_states[slot], (*tensors, step, *others)
        if known is not None and len(known) == len(now) and all(map(is_, known, now)):
            return flushed
        if step is not None and not _countable(step, self._params[slot]):
            raise Error(
                f"optfuse: state['step'] of {self._labels[slot]} must be a 0-dim float tensor on "
                "the CPU, or a float32 one on its parameter's GPU, as torch.optim makes it, not "
                f"{step!r}"
            )
        replaces = known is not None and any(tensor is not None for tensor in known)
        if replaces and not flushed:  # what is pending is for the old ones
            self._flush(drain=False)
        torch.ops.optfuse.set_state(self.plan, slot, self._local_state(slot, tensors), step, fresh)
        if self.traced is not None:
            torch.ops.optfuse.know_counters(self.plan, slot, others)
        self.slot_states[slot] = now
        if self.sharded is not None and is_dtensor(self._params[slot]):
            self.sharded.tell_state(slot, list(tensors))
        return flushed or replaces

    def _local_state(self, slot: int, tensors: _State) -> list[Tensor | None]:
        param = self._params[slot]
        if not is_dtensor(param):
            return list(tensors)
        for tensor in tensors[: len(self.rule.state)]:
            if tensor is not None:
                check_layout("the optimizer state", self._labels[slot], param, tensor)
        return list(map(local_of, tensors))

    def make_state(self, optimizer: Optimizer, slots: list[int]) -> None:
        """As stock does at a parameter's first gradient."""
        groups = optimizer.param_groups
        flushed = False
        with self._telling:
            self._state_snapshot.forget()  # the next sync looks at all of it once
            for slot in slots:
                param = self._params[slot]
                is_new, is_absent = not optimizer.state.get(param), param not in optimizer.state
                try:
                    if self.traced is None:
                        group = groups[self._group_of[slot]]
                        self.rule.make_state(optimizer, self.stock, group, param)
                    else:
                        self.traced.make_state(optimizer, slot, param)
                    flushed = self._set_state(slot, optimizer.state[param], True, flushed)
                except BaseException:
                    if is_new:  # the library may not know that it is fresh
                        optimizer.state.pop(param, None)
                    raise
                if self.mode == BACKWARD:
                    self._used.make(param, optimizer.state[param], is_absent, is_over=False)

    # ---- the two schedules

    def optimizer(self) -> Optimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise Error("optfuse: the optimizer no longer exists")
        return optimizer

    def sync_params(self, optimizer: Optimizer) -> None:
        """Programs have counters in them, which step() advances for the parameters they are for."""
        if self.traced is not None and self.mode == BACKWARD and lib.of_shim_unconfirmed(self.plan):
            return
        if not self.snapshot.have_same_params(optimizer.param_groups):
            self.rebuild(optimizer)

    def _sync_inputs(self, optimizer: Optimizer, same_groups: bool) -> None:
        """What updates from here on read: options and state."""
        state = optimizer.__dict__["state"]
        if not same_groups:
            self._sync_hyper(optimizer.param_groups)
        if not self._state_snapshot.is_same(state):
            self._sync_state(state)

    def _begin_own(self, own: updates.Own, optimizer: Optimizer) -> None:
        """The same, for the class's own step()."""
        self._flush(drain=False)  # what is pending keeps its own options
        own.begin(optimizer, self.mode == BACKWARD)
        if own.changed:
            self._state_snapshot.forget()
            own.changed = False
        self._sync_inputs(optimizer, False)

    def _refuse_late_change(
        self, optimizer: Optimizer, same_groups: bool, at_step: bool = False
    ) -> None:
        """Between backward() and step(), where stock would still obey it."""
        used = self._used
        if used.has_begun and lib.of_shim_unconfirmed(self.plan) and guard("late"):
            used.refuse_changes(self._told, self, optimizer, same_groups, at_step)

    def _all_told(self) -> Told:
        rule, is_traced = self.rule, self.traced is not None
        counters = (*rule.counters, "step") if rule.counts_steps else rule.counters
        keys = None if is_traced or self.own is not None else (*rule.state, *counters)
        of_slots = self._params, self._labels, self._group_of
        return Told(self.plan, *of_slots, is_traced, rule.reads_scale, keys)

    def have_same_params(self, groups: Groups) -> bool:
        return self.snapshot.have_same_params(groups)

    def _noted(self) -> Noted | None:
        updater = self.own or self.traced
        return None if updater is None else updater.noted

    def changed_option(self, number: int, group: dict[str, Any]) -> str | None:
        noted = self._noted()
        if noted is not None:
            return noted.changed_option(number, group)
        changed = self.rule.changed_option(self._hyper[number], group)
        return changed or self._scalars.changed_option(number, group)

    def changed_attribute(self, optimizer: Optimizer) -> str | None:
        noted = self._noted()
        return None if noted is None else noted.changed_attribute(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        same_groups = self._are_same(optimizer.param_groups)
        self._refuse_late_change(optimizer, same_groups, at_step=True)
        if self.sharded is None:
            self._step(optimizer, same_groups)
        else:
            self._step_sharded(optimizer, self.sharded)

    def _step_sharded(self, optimizer: Optimizer, sharded: Sharded) -> None:
        if sharded.are_replaced():
            self.snapshot.forget()
        self.sync_params(optimizer)
        if self.sharded is None:
            self._step(optimizer, self._are_same(optimizer.param_groups))
            return
        sharded, stepped = self.sharded, False
        sharded.follow()
        sharded.lend()
        try:
            self._step(optimizer, self._are_same(optimizer.param_groups))
            stepped = True
        finally:
            sharded.take_back(stepped)

    def _are_same(self, groups: Groups) -> bool:
        """As far as step() tells the library of them: a program has its numbers in it."""
        if self.traced is not None and self.mode != BACKWARD:
            return self.snapshot.have_same_params(groups)
        return self.snapshot.are_same(groups)

    def _step(self, optimizer: Optimizer, same_groups: bool) -> None:
        if not same_groups:
            self.sync_params(optimizer)
        if hand_set_scale.has_scale(optimizer, self.rule):
            if not lib.of_shim_unconfirmed(self.plan):
                self._step_scaled(optimizer)
                return
            if guard("late_scale"):
                raise Error(_LATE_SCALE)
        todo = lib.of_shim_todo(self.plan) if self.mode == BACKWARD else UPDATE
        if self.own is not None:
            self._begin_own(self.own, optimizer)
        elif self.traced is not None and not self._begin_traced(self.traced, optimizer):
            return
        elif todo & UPDATE:
            self._sync_inputs(optimizer, same_groups)  # else the next backward does it
        if self.own is None and self.traced is None:  # a program has its numbers in it
            self._scalars.tell(optimizer, same_groups)
        if todo & ATTACH:
            self.attach()
        self._order.check()
        self.marked = True
        missing = ctypes.c_size_t()
        arguments = (self.plan,), (self._needs,), (len(self._params),), (ctypes.byref(missing),)
        # An interrupt that waits is raised where the call returns, before its value could get a
        # name; what a list is extended by is in it then.
        status: list[int] = []
        try:
            status.extend(map(lib.of_shim_step, *arguments))
            if status[-1] == NEEDS_STATE:
                self.make_state(optimizer, self._needs[: missing.value])
                status.extend(map(lib.of_shim_step, *arguments))
            if status[-1] != OK:
                raise_failure(self.own)
        finally:
            done = bool(status) and status[-1] == OK
            if done and self.mode == BACKWARD:
                self._used.put_in_order(optimizer.__dict__["state"], self._slots)
            if done and self.own is not None:
                self.own.advance(optimizer)
            if self.traced is not None and self.traced.begun:
                self._end_traced(self.traced, optimizer, done)
                if done:
                    self.sync_params(optimizer)
            if done:
                self._used.confirm()
        if compiled.running() or _gpu.replays_are_unseen():
            self.flush()

    def _step_scaled(self, optimizer: Optimizer) -> None:
        """With a scale that was set by hand; backward fusion has left all gradients to it."""
        self.flush()
        self.adopt_state(optimizer)
        self._order.check()
        hand_set_scale.step_with_scale(optimizer, self.stock, self.rule)
        self._state_snapshot.forget()
        self._used.confirm()
        lib.of_shim_restart_count(self.plan)

    def begin_backward(self, only_adds: bool) -> None:
        """At the first complete gradient of a backward pass."""
        if self.options.accumulate != 1:
            loss_scale.refuse_nested()
        if not only_adds:
            with self._telling:
                self._tell_all(self.optimizer())

    def _tell_all(self, optimizer: Optimizer) -> None:
        loss_scale.refuse_if_scaled()
        groups = optimizer.param_groups
        same_groups = self.snapshot.are_same(groups)
        if not same_groups and guard("groups") and not self.snapshot.have_same_params(groups):
            raise Error(
                "optfuse: param_groups has other parameters than at the last step(), which a "
                "backward pass can't start to update; call zero_grad() after changing "
                "param_groups. Nothing was updated"
            )
        self._refuse_late_change(optimizer, same_groups)
        if self.own is not None:
            self._begin_own(self.own, optimizer)
        else:
            if self.traced is not None:
                try:
                    self._begin_programs(self.traced, optimizer, whole=True)
                except Untraceable as error:
                    raise Error(_UNTRACEABLE.format(self.stock.__qualname__, error)) from error
            self._sync_inputs(optimizer, same_groups)
            if self.traced is None:
                self._scalars.tell(optimizer, same_groups)
            else:
                self._sharing()
        self._used.begin(optimizer, self._state_snapshot.told)
        self.marked = True

    def _begin_programs(self, traced: Traced, optimizer: Optimizer, whole: bool) -> None:
        same_state = self._state_snapshot.is_same(optimizer.__dict__["state"])
        traced.begin(optimizer, self._params, whole, same_state)

    def _begin_traced(self, traced: Traced, optimizer: Optimizer) -> bool:
        """Makes the programs of this step. False: it can't be traced, and the class's own step()
        has been taken."""
        if traced.begun and self.mode == BACKWARD and lib.of_shim_unconfirmed(self.plan):
            return True
        try:
            self._begin_programs(traced, optimizer, whole=False)
        except Untraceable as error:
            if self.mode == BACKWARD:
                raise Error(_UNTRACEABLE.format(self.stock.__qualname__, error)) from error
            traced.untraced += 1
            traced.why_not = type(error), str(error)
            times = "once" if traced.untraced == 1 else f"{traced.untraced} times"
            self.own_step_because = (f"{times} it could not be traced: {error}",)
            self.flush()
            self.adopt_state(optimizer)
            self._order.check()
            step_of(self.stock)(optimizer)
            return False
        return True

    def _end_traced(self, traced: Traced, optimizer: Optimizer, done: bool) -> None:
        if done:
            state = optimizer.__dict__["state"]
            snapshot = self._state_snapshot
            # In forward mode the guide was the last that could change the state; it was looked at
            # after that, and make_state() has the snapshot forgotten.
            same = snapshot.is_same(state) if self.mode == BACKWARD else not snapshot.is_empty()
            kept = traced.advance(optimizer, self._params, same)
            if self._used.has_changed():
                snapshot.forget()
            elif not kept:
                snapshot.remember(state)
        elif self.mode != BACKWARD:
            self._flush(drain=False)
            traced.abandon(optimizer, self._params)
            self._state_snapshot.forget()

    def await_reduction(self) -> None:
        """At the end of a backward pass, before its last updates."""
        if self.options.reduction is not None:
            self.options.reduction.finish()

    def apply(self, slot: int) -> None:
        """One update by the class's own step(). Under the plan's lock."""
        param = self._params[slot]
        made = updates.apply(self.plan, slot, param)
        optimizer = self._optimizer()
        if optimizer is None:
            return
        state = optimizer.__dict__["state"]
        is_absent = param not in state
        if made is not None:
            state[param] = made
        if self.mode == BACKWARD:
            self._used.make(param, state.get(param, {}), is_absent, is_over=True)

    def add_only(self, entered: int) -> None:
        """Enters (+1) or leaves (-1) a context whose passes only add."""
        if self._free.alive:
            lib.of_shim_add_only(self.plan, entered)

    def _flush(self, drain: bool) -> bool:
        cleaned = ctypes.c_bool()
        check(lib.of_shim_flush(self.plan, drain, ctypes.byref(cleaned)))
        return cleaned.value

    def flush(self, drain: bool = False) -> None:
        """Launches what is pending and takes the mark off every tensor, but for
        those that a GPU may still be working on; drain: waits for it first."""
        optimizer = self._optimizer()  # keeps the parameters alive meanwhile
        if optimizer is not None:
            self.marked &= not self._flush(drain)

    def flush_for_compiled(self) -> None:
        """Compiled code sees no marks, and may run on any stream. On a GPU
        nothing is left pending from here on: there is little to gain by it, and
        the wait is needed this once only."""
        self.flush()
        if self.marked and any(is_gpu(param.device) for param in self._params):
            self.flush(drain=True)
            lib.of_shim_stop_deferring(self.plan)
            self.compiled = True


def raise_failure(own: updates.Own | None) -> None:
    """After a failed step: what the class's own step() raised is the cause."""
    cause = None if own is None else updates.interrupted()
    if isinstance(cause, KeyboardInterrupt | SystemExit):
        raise cause
    raise Error(f"optfuse: {message()}") from cause


def _countable(step: Any, param: Tensor) -> bool:
    if not isinstance(step, Tensor) or step.dim() != 0:
        return False
    if step.device.type == "cpu":
        return step.dtype in (torch.float32, torch.float64)
    return is_gpu(step.device) and step.device == param.device and step.dtype == torch.float32
