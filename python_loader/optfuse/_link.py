# SPDX-License-Identifier: BSD-3-Clause
"""The join of one fused optimizer to its plan in the library: step(), backward passes, launches.
The ledger tells the library what updates read; how they are made, its updater knows."""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optfuse import _gpu
from optfuse._backward import consumed_gradients, loss_scale
from optfuse._dtensor.local_tensors import Sharded, local_of
from optfuse._gpu import is_gpu
from optfuse._library import bindings
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
from optfuse._options import LINK, Delayed, Options
from optfuse._own_step import hand_set_scale, updates
from optfuse._own_step.twin import step_of
from optfuse._patches import compiled
from optfuse._rules import Rule
from optfuse._snapshot import params_of
from optfuse._traced.updates import Traced
from optfuse._trials.rule_choice import rule_of, why_own_step
from optfuse._updaters.choice import promise_of
from optfuse._updaters.ledger import Ledger

links: weakref.WeakValueDictionary[int, Link] = weakref.WeakValueDictionary()
_LATE_SCALE = (
    "optfuse: grad_scale or found_inf of the optimizer was set after backward() had made updates "
    "without it. Set both to None and call step(), which confirms these; set them before "
    'backward(), or use mode="forward"'
)


def link_of(optimizer: Optimizer) -> Link:
    return optimizer.__dict__[LINK]  # type: ignore[no-any-return]


class Link:
    """Owned by the optimizer; frees the plan when the optimizer dies."""

    gpu_bits_differ: tuple[str, ...] = ()
    compiled = False  # compiled code stopped the deferring
    scaled_steps = 0  # with a scale that was set by hand
    marked = False  # tensors may carry the pending mark
    unasked: Callable[[], None] | None = None  # run fused it: whom to tell
    delayed: Delayed | None = None  # parameters whose updates arrive late

    def __init__(self, optimizer: Optimizer, options: Options, rule: Rule | None = None) -> None:
        """rule: another than the optimizer's own, for a trial of it."""
        self.stock = type(optimizer)
        self._why_own_step = () if rule else tuple(why_own_step(optimizer))
        self.rule = rule or rule_of(optimizer)
        promise = promise_of(optimizer, self.stock, self.rule)
        self.options = options
        self.mode = options.mode
        self.max_grad_norm = options.max_grad_norm
        self.saved: dict[str, Any] = {}  # attributes that unfuse() puts back
        self.plan = _new_plan(self.rule, options)
        self._optimizer = weakref.ref(optimizer)
        self._free = weakref.finalize(optimizer, updates.free_plan, self.plan)
        self._free.atexit = False  # at exit nothing is launched
        links[self.plan] = self
        if options.reduction is not None:
            options.reduction.add(self)
        try:
            of_plan = self.plan, self._free, options, self.rule
            self.ledger = Ledger(*of_plan, self.stock, promise)
            params = chain.from_iterable(map(params_of, optimizer.param_groups))
            self.ledger.rebuild(optimizer, params)
        except BaseException:
            self._free()
            raise

    def close(self, optimizer: Optimizer) -> None:
        """Launches what is pending and gives the parameters back."""
        self.ledger.refuse_in_backward("unfuse()")
        self.flush()
        if self.delayed is not None:
            self.delayed.close()
        if self.mode == BACKWARD:
            self.ledger.slots.detach()
            self._drop_consumed()
        links.pop(self.plan, None)
        self.ledger.close()
        self._free()

    def _drop_consumed(self) -> None:
        """Nobody can read what the updates have used up. What step() has not confirmed stays: at
        such a gradient stock's step() raises."""
        params, is_ahead = self.ledger.slots.params, self.ledger.is_ahead
        confirmed = [p for slot, p in enumerate(params) if not is_ahead(slot)]
        consumed_gradients.drop([*confirmed, *map(local_of, confirmed)])

    def optimizer(self) -> Optimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise Error("optfuse: the optimizer no longer exists")
        return optimizer

    @property
    def traced(self) -> Traced | None:
        """The programs, if the class is traced."""
        return self.ledger.updater.traced

    @property
    def own_step_because(self) -> tuple[str, ...]:
        return self.ledger.updater.own_step_because or self._why_own_step

    def slot_of(self, param: Tensor) -> int | None:
        return self.ledger.slots.number_of(param) if self._free.alive else None

    def label(self, slot: int) -> str:
        return self.ledger.slots.labels[slot]

    # ---- step()

    def step(self, optimizer: Optimizer) -> None:
        same_groups = self.ledger.are_same(optimizer.param_groups)
        self.ledger.refuse_late_change(optimizer, same_groups, at_step=True)
        sharded = self.ledger.slots.sharded
        if sharded is None:
            self._step(optimizer, same_groups)
        else:
            self._step_sharded(optimizer, sharded)

    def _step_sharded(self, optimizer: Optimizer, sharded: Sharded) -> None:
        if sharded.are_replaced():
            self.ledger.options.snapshot.forget()
        self.ledger.sync_params(optimizer)
        now = self.ledger.slots.sharded
        if now is None:
            self._step(optimizer, self.ledger.are_same(optimizer.param_groups))
            return
        stepped = False
        now.follow()
        now.lend()
        try:
            self._step(optimizer, self.ledger.are_same(optimizer.param_groups))
            stepped = True
        finally:
            now.take_back(stepped)

    def _step(self, optimizer: Optimizer, same_groups: bool) -> None:
        if not same_groups:
            self.ledger.sync_params(optimizer)
        if hand_set_scale.has_scale(optimizer, self.rule):
            if not lib.of_shim_unconfirmed(self.plan):
                self._step_scaled(optimizer)
                return
            if guard("late_scale"):
                raise Error(_LATE_SCALE)
        todo = lib.of_shim_todo(self.plan) if self.mode == BACKWARD else UPDATE
        updater = self.ledger.updater
        if not updater.begin(optimizer, self.ledger, same_groups, bool(todo & UPDATE)):
            self._step_by_class(optimizer, step_of(self.stock))
            return
        if todo & ATTACH:
            self.ledger.slots.attach()
        self.ledger.order.check()
        self.marked = True
        self._create_updates(optimizer)
        if compiled.running() or _gpu.replays_are_unseen():
            self.flush()

    def _create_updates(self, optimizer: Optimizer) -> None:
        ledger, slots, missing = self.ledger, self.ledger.slots, ctypes.c_size_t()
        arguments = (self.plan,), (slots.needs,), (len(slots),), (ctypes.byref(missing),)
        # An interrupt that waits is raised where the call returns, before its value could get a
        # name; what a list is extended by is in it then.
        status: list[int] = []
        try:
            status.extend(map(lib.of_shim_step, *arguments))
            if status[-1] == NEEDS_STATE:
                ledger.make_state(optimizer, slots.needs[: missing.value])
                status.extend(map(lib.of_shim_step, *arguments))
            if status[-1] != OK:
                _raise_failure(ledger.updater.failure())
        finally:
            done = bool(status) and status[-1] == OK
            if done and self.mode == BACKWARD:
                ledger.used.put_in_order(optimizer.__dict__["state"], slots.numbers)
            ledger.updater.end(optimizer, ledger, done)
            if done:
                ledger.used.confirm()

    def _step_by_class(self, optimizer: Optimizer, step: Callable[..., Any]) -> None:
        """By the class's own step(), of which the library knows nothing."""
        self.flush()
        self.ledger.adopt_state(optimizer)
        self.ledger.order.check()
        step(optimizer)

    def _step_scaled(self, optimizer: Optimizer) -> None:
        """With a scale that was set by hand; backward fusion has left all gradients to it."""
        self._step_by_class(
            optimizer,
            functools.partial(hand_set_scale.step_with_scale, stock=self.stock, rule=self.rule),
        )
        self.scaled_steps += 1
        self.ledger.state.forget()
        self.ledger.used.confirm()
        lib.of_shim_restart_count(self.plan)

    # ---- backward mode

    def begin_backward(self, only_adds: bool) -> None:
        """At the first complete gradient of a backward pass."""
        if self.options.accumulate != 1:
            loss_scale.refuse_nested()
        if not only_adds:
            with self.ledger.telling:
                self._begin_pass(self.optimizer())

    def _begin_pass(self, optimizer: Optimizer) -> None:
        loss_scale.refuse_if_scaled()
        ledger, groups = self.ledger, optimizer.param_groups
        same_groups = ledger.options.snapshot.are_same(groups)
        if not same_groups and guard("groups") and not ledger.have_same_params(groups):
            raise Error(
                "optfuse: param_groups has other parameters than at the last step(), which a "
                "backward pass can't start to update; call zero_grad() after changing "
                "param_groups. Nothing was updated"
            )
        ledger.refuse_late_change(optimizer, same_groups)
        ledger.updater.begin_pass(optimizer, ledger, same_groups)
        ledger.used.begin(optimizer, ledger.state.told)
        self.marked = True

    def await_reduction(self) -> None:
        """At the end of a backward pass, before its last updates."""
        if self.options.reduction is not None:
            self.options.reduction.finish()

    def apply(self, slot: int) -> None:
        """One update by the class's own step(). Under the plan's lock."""
        param = self.ledger.slots.params[slot]
        made = updates.apply(self.plan, slot, param)
        optimizer = self._optimizer()
        if optimizer is None:
            return
        state = optimizer.__dict__["state"]
        is_absent = param not in state
        if made is not None:
            state[param] = made
        if self.mode == BACKWARD:
            self.ledger.used.make(param, state.get(param, {}), is_absent, is_over=True)

    def add_only(self, entered: int) -> None:
        """Enters (+1) or leaves (-1) a context whose passes only add."""
        if self._free.alive:
            lib.of_shim_add_only(self.plan, entered)

    # ---- launches

    def flush(self, drain: bool = False) -> None:
        """Launches what is pending and takes the mark off every tensor, but for
        those that a GPU may still be working on; drain: waits for it first."""
        optimizer = self._optimizer()  # keeps the parameters alive meanwhile
        if optimizer is not None:
            self.marked &= not bindings.flush(self.plan, drain)

    def flush_for_compiled(self) -> None:
        """Compiled code sees no marks, and may run on any stream. On a GPU
        nothing is left pending from here on: there is little to gain by it, and
        the wait is needed this once only."""
        self.flush()
        if self.marked and any(is_gpu(param.device) for param in self.ledger.slots.params):
            self.flush(drain=True)
            lib.of_shim_stop_deferring(self.plan)
            self.compiled = True


def _new_plan(rule: Rule, options: Options) -> int:
    handle = ctypes.c_void_p()
    name, isa = rule.name.encode(), os.environ.get("OPTFUSE_ISA", "").encode()
    numbers = options.bucket_bytes, options.accumulate
    check(lib.of_shim_plan_new(name, options.mode, isa, *numbers, ctypes.byref(handle)))
    assert handle.value is not None
    if options.side_stream:
        lib.of_shim_update_beside(handle.value)
    return handle.value


def _raise_failure(cause: BaseException | None) -> None:
    """After a failed step. cause: what the class's own step() raised."""
    if isinstance(cause, KeyboardInterrupt | SystemExit):
        raise cause
    raise Error(f"optfuse: {message()}") from cause
