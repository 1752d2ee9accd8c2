# SPDX-License-Identifier: BSD-3-Clause
"""step() and zero_grad() of a fused optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.optim import Optimizer

from optfuse._arguments.check import parameters_of
from optfuse._arguments.wrappers import unwrapped
from optfuse._clipping.clip_norm import clip
from optfuse._library.bindings import BACKWARD, Error, lib, lib_with_gil
from optfuse._link import Link, link_of
from optfuse._patches.profiling import ZERO_GRAD, addresses_are_noted, has_hooks, is_watched


def _step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Creates this step's updates; they are launched by the schedule."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    link = link_of(self)
    if link.max_grad_norm is not None:
        clip(parameters_of(self), link.max_grad_norm)
    if link.delayed is None:
        link.step(self)
    else:
        link.delayed.step(self, link)
    return loss


def _watched_step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    loss = _step(self, closure)
    if addresses_are_noted():
        link_of(self).flush()
    return loss


def _make_step() -> Callable[..., Any]:
    """step() as every optimizer has it, for those who watch it and for dynamo, and a shorter
    way for others. What a closure does comes too late for the choice."""
    watched = torch._dynamo.disable(Optimizer.profile_hook_step(_watched_step))

    @functools.wraps(_step)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        traced = get_eval_frame_callback() is not None
        if args or kwargs or traced or is_watched() or has_hooks(self):
            return watched(self, *args, **kwargs)
        return _step(self)

    step = torch._dynamo.disable(step, recursive=False)
    step.hooked = True  # type: ignore[attr-defined]
    return step


step = _make_step()


def _may_zero_here(link: Link, set_to_none: bool) -> bool:
    """Whether stock's zero_grad() would only let go of gradients, seen by nobody."""
    if get_eval_frame_callback() is not None or not set_to_none or not link.ledger.slots.are_plain:
        return False
    return ZERO_GRAD is not None and link.stock.zero_grad is ZERO_GRAD and not is_watched()


def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
    self = unwrapped(self)  # Lightning's wrapper has this method, too
    link = link_of(self)
    if link.mode == BACKWARD and lib.of_shim_unconfirmed(link.plan):
        raise Error(
            "optfuse: zero_grad() before step(): backward fusion has already applied the "
            "gradients that this would discard. Call step() after each backward; run passes "
            "that only add to the gradients, or whose gradients are thrown away, inside "
            "`with optfuse.accumulate(optimizer):`; or use "
            'optfuse.fuse(optimizer, mode="forward")'
        )
    if link.mode == BACKWARD:
        link.ledger.sync_params(self)
        lib.of_shim_restart_count(link.plan)
    if _may_zero_here(link, set_to_none) and (
        link.mode == BACKWARD or link.ledger.have_same_params(self.param_groups)
    ):
        lib_with_gil.of_shim_drop_gradients(link.plan)
    else:
        link.stock.zero_grad(self, set_to_none)
