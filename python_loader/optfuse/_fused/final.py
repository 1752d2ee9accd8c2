# SPDX-License-Identifier: BSD-3-Clause
"""Backward(final=True): what step() is where each update is final when its gradient is complete,
as if a hook had made it; and what this mode sees of PyTorch.

The other way round, step_parameter() is one such hook's call: the names that trainers use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.optim import Optimizer

from optfuse._arguments.check import label, parameters_of
from optfuse._arguments.wrappers import unwrapped
from optfuse._dtensor.local_tensors import is_dtensor
from optfuse._fused import methods
from optfuse._library.bindings import FINAL, Error, lib
from optfuse._link import Link, link_of, links
from optfuse._patches.listed import FINAL_UPDATES
from optfuse._patches.replacing import replace, warn_of_changes

_KEEPER = "_optfuse_keeper"


def _final_links() -> list[Link]:
    return [link for link in list(links.values()) if link.mode == FINAL]


@torch._dynamo.disable
def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """The passes since the last one have made their updates and run the hooks. What is left is a
    gradient that somebody has put into .grad. With a closure: runs that."""
    link = link_of(self)
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
        link.has_stepped = False
        return loss
    if not link.has_stepped:
        return methods.step(self)
    link.has_stepped = False
    if any(param.grad is not None for param in parameters_of(self)):
        with link.alone:
            link.step(self)
    return None


class Keeper:
    """An attribute of a parameter that has the optimizer live as long as that: nobody calls its
    step(), so a script may not keep it. Python's collector sees this circle, and none through the
    library. Who pickles the parameter gets None."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def keep(optimizer: Optimizer) -> None:
    """Until let_go(), or as long as its parameters live."""
    for param in parameters_of(optimizer)[:1]:
        param.__dict__[_KEEPER] = Keeper(optimizer)


def let_go(optimizer: Optimizer) -> None:
    for param in parameters_of(optimizer):
        param.__dict__.pop(_KEEPER, None)


# ---- the trainers' protocol


@torch._dynamo.disable
def step_parameter(self: Any, p: Tensor, group: dict[str, Any], i: int | None = None) -> None:
    """The step() of one parameter, whose gradient is in p.grad and stays there: for a hook that is
    called when the gradient is complete. Its update has run when this returns.

    p: a parameter of the optimizer. group: the one of param_groups that has p now. i: its place
    there, which nobody needs. Nothing happens where p.grad is None, or where backward() has made
    this update already: then that is confirmed.

    Raises optfuse.Error for another parameter or group."""
    optimizer: Any = unwrapped(self)
    link = link_of(optimizer)
    slot = link.slot_of(p)
    if slot is None:
        raise Error(
            "optfuse: step_parameter() got a tensor that is no parameter of this optimizer; give "
            "it the parameter itself, after add_param_group()"
        )
    groups, number = optimizer.param_groups, link.slots.group_of[slot]
    if number >= len(groups) or groups[number] is not group:
        raise Error(
            f"optfuse: step_parameter() of {link.label(slot)} got a group that is not the one of "
            "optimizer.param_groups that has it now: load_state_dict() makes new ones"
        )
    with link.alone:
        link.updater.step_one(optimizer, link.slots, slot)


def step_param(self: Any, p: Tensor, group: dict[str, Any]) -> None:
    """step_parameter() by another name of the trainers'."""
    step_parameter(self, p, group)


# ---- what this mode sees of PyTorch


def _attach_again(register: Callable[..., Any]) -> Callable[..., Any]:
    """The first hook that is registered in Python takes the place of ours."""

    @functools.wraps(register)
    def register_and_attach(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        handle = register(self, *args, **kwargs)
        for link in _final_links():
            if link.slot_of(self) is not None:
                torch.ops.optfuse.attach(link.plan, link.slots.locals)
        return handle

    return register_and_attach


def _tell_of_nested(run: Callable[..., Any]) -> Callable[..., Any]:
    """A pass inside of another one, as reentrant checkpoints start it, is a part of that."""

    @functools.wraps(run)
    def run_and_tell(*args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            return run(*args, **kwargs)
        lib.of_shim_begin_nested_pass()
        try:
            return run(*args, **kwargs)
        finally:
            lib.of_shim_end_nested_pass()

    return run_and_tell


@functools.cache
def _install() -> None:
    """Once per process."""
    warn_of_changes(FINAL_UPDATES)
    register = torch.Tensor.register_post_accumulate_grad_hook
    run = _tell_of_nested(torch.autograd.graph._engine_run_backward)
    for owner, function in (
        (torch.Tensor, _attach_again(register)),
        (torch.autograd, run),
        (torch.autograd.graph, run),
    ):
        replace(owner, function.__name__, function, FINAL_UPDATES)


def start(optimizer: Optimizer) -> None:
    """Before an optimizer is fused in this mode. Raises optfuse.Error if it can't be."""
    for index, group in enumerate(optimizer.param_groups):
        for i, param in enumerate(group["params"]):
            if is_dtensor(param):
                raise Error(
                    f"optfuse: {label(group, index, i)} is a DTensor, and Backward(final=True) "
                    'updates parameters of one process only; use mode="backward"'
                )
    _install()
