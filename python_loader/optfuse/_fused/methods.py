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
from optfuse._link import Link, link_of
from optfuse._patches.profiling import (
    ZERO_GRAD,
    addresses_are_noted,
    has_hooks,
    is_observed,
    is_watched,
)


def _step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Creates this step's updates; they are launched by the schedule."""
    link = link_of(self)
    loss = None if closure is None else link.updater.evaluate(self, closure)
    with link.alone:
        if link.max_grad_norm is not None:
            clip(parameters_of(self), link.max_grad_norm)
        if link.delayed is None:
            link.step(self)
        else:
            link.delayed.step(self, link)
    return loss


def _step_unwatched(self: Optimizer) -> bool:
    """False: nothing was done, since somebody watches."""
    link = link_of(self)
    if link.max_grad_norm is None and link.delayed is None:
        return link.step(self, unless_watched=True)
    if is_watched():
        return False
    _step(self)
    return True


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
        is_traced = get_eval_frame_callback() is not None
        if args or kwargs or is_traced or is_observed() or has_hooks(self):
            return watched(self, *args, **kwargs)
        return None if _step_unwatched(self) else watched(self)

    step = torch._dynamo.disable(step, recursive=False)
    step.hooked = True  # type: ignore[attr-defined]
    return step


step = _make_step()


def _may_zero_here(link: Link, set_to_none: bool) -> bool:
    """Whether stock's zero_grad() would only let go of gradients, seen by nobody but those of
    whom the library knows."""
    if get_eval_frame_callback() is not None or not set_to_none or not link.slots.are_plain:
        return False
    return ZERO_GRAD is not None and link.stock.zero_grad is ZERO_GRAD and not is_observed()


def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
    self = unwrapped(self)  # Lightning's wrapper has this method, too
    link = link_of(self)
    if not link.drop_gradients(self, _may_zero_here(link, set_to_none)):
        link.stock.zero_grad(self, set_to_none)
