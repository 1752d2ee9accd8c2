# SPDX-License-Identifier: BSD-3-Clause
"""The join of one fused optimizer to its plan in the library: step(), backward passes, launches.
The ledger tells the library what updates read; how they are made, its updater knows."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optfuse._backward import consumed_gradients
from optfuse._dtensor.local_tensors import local_of
from optfuse._gpu import is_gpu
from optfuse._library import bindings
from optfuse._library.bindings import BACKWARD, LEFT, Error, check, lib, lib_with_gil
from optfuse._options import FORCED, LINK, OFF, Delayed, Options
from optfuse._patches import compiled, cuda_graphs
from optfuse._rules import RegisteredRule, Rule
from optfuse._updaters.ledger import Ledger
from optfuse._updaters.registered import Registered, free_plan
from optfuse._updaters.slots import params_of
from optfuse._updaters.updater import OfPlan

links: weakref.WeakValueDictionary[int, Link] = weakref.WeakValueDictionary()


def link_of(optimizer: Optimizer) -> Link:
    return optimizer.__dict__[LINK]  # type: ignore[no-any-return]


class Link:
    """Owned by the optimizer; frees the plan when the optimizer dies."""

    gpu_bits_differ: tuple[str, ...] = ()
    compiled = False  # compiled code stopped the deferring
    unasked: Callable[[], None] | None = None  # run fused it: whom to tell
    delayed: Delayed | None = None  # parameters whose updates arrive late

    def __init__(self, optimizer: Optimizer, options: Options, rule: Rule) -> None:
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
        if options.reduction is not None:
            options.reduction.add(self)
        try:
            of_plan = OfPlan(self.plan, self.stock, rule, options)
            self.ledger = Ledger(of_plan, self._free, optimizer)
            links[self.plan] = self
            params = chain.from_iterable(map(params_of, optimizer.param_groups))
            self.ledger.rebuild(optimizer, params)
        except BaseException:
            self._free()
            raise

    def close(self) -> None:
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

    def slot_of(self, param: Tensor) -> int | None:
        return self.ledger.slots.number_of(param) if self._free.alive else None

    # ---- what the ledger in the library does

    def step(self, optimizer: Optimizer, unless_watched: bool = False) -> bool:
        """False: nothing was done, since an observer of PyTorch's functions is at work."""
        self.ledger.marked = True
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

    # ---- backward mode

    def apply(self, slot: int) -> None:
        """One update by the class's own step(). Under the plan's lock."""
        optimizer, updater = self.kept(), self.ledger.updater
        if optimizer is None or not isinstance(updater, Registered):
            raise Error("optfuse: this optimizer no longer exists")
        param = self.ledger.slots.params[slot]
        is_absent = param not in optimizer.__dict__["state"]
        entry = updater.run(optimizer, slot, param)
        self.ledger.note_update(slot, entry or {}, is_absent)

    def add_only(self, entered: int) -> None:
        """Enters (+1) or leaves (-1) a context whose passes only add."""
        if self._free.alive:
            lib.of_shim_add_only(self.plan, entered)

    # ---- launches

    def flush(self, drain: bool = False) -> None:
        """Launches what is pending and takes the mark off every tensor but gradients, and those
        that a GPU may still be working on; drain: waits for it first."""
        optimizer = self.kept()  # keeps the parameters alive meanwhile
        if optimizer is not None:
            self.ledger.marked &= not bindings.flush(self.plan, drain)

    def flush_for_compiled(self) -> None:
        """Compiled code sees no marks, and may run on any stream. On a GPU
        nothing is left pending from here on: there is little to gain by it, and
        the wait is needed this once only."""
        self.flush()
        if self.ledger.marked and any(is_gpu(param.device) for param in self.ledger.slots.params):
            self.flush(drain=True)
            lib.of_shim_stop_deferring(self.plan)
            self.compiled = True


def _new_plan(rule: Rule, options: Options) -> int:
    handle = ctypes.c_void_p()
    name, isa = rule.name.encode(), os.environ.get("OPTFUSE_ISA", "").encode()
    by_one = isinstance(rule, RegisteredRule)  # whose updates don't wait for each other
    numbers = 1 if by_one else options.bucket_bytes, options.accumulate
    check(lib.of_shim_plan_new(name, options.mode, isa, *numbers, ctypes.byref(handle)))
    assert handle.value is not None
    if options.side_stream:
        lib.of_shim_update_beside(handle.value)
    if not options.fold:
        lib.of_shim_write_gradients(handle.value)
    if options.products != OFF:
        lib.of_shim_promise_gradients(handle.value, options.products == FORCED)
    return handle.value
