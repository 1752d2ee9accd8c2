# SPDX-License-Identifier: BSD-3-Clause
"""Backward fusion and loss scaling: the gradients of a scaled loss must be
divided by the scale before the update, so backward fusion can't use them."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from optfuse._library.bindings import Error, guard
from optfuse._patches.replacing import replace

#: Graph tasks whose loss was scaled. The library looks whether there are some.
running: set[int] = set()
_NESTED_IN = torch.autograd.function.BackwardCFunction.apply.__code__
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_part_of_a_node: set[types.CodeType] = set()


def _mark(_: Tensor) -> None:
    task = torch._C._current_graph_task_id()
    running.add(task)
    torch.autograd.Variable._execution_engine.queue_callback(lambda: running.discard(task))


def is_part_of_a_node(function: Callable[..., Any]) -> None:
    """The backward() of an autograd function calls it, in the pass that it is about."""
    _part_of_a_node.add(function.__code__)


def _is_nested() -> bool:
    """Whether this backward was started inside another one, as reentrant
    checkpointing does from Python."""
    frame: Any = sys._getframe(1)
    of_this_pass = False  # the next node's frame is
    while frame is not None:
        code = frame.f_code
        if code is _NESTED_IN and not of_this_pass:
            return True
        of_this_pass = code in _part_of_a_node or (
            of_this_pass and code not in (_ENGINE, _NESTED_IN)
        )
        frame = frame.f_back
    return False


def refuse_nested() -> None:
    """At the beginning of a pass that is counted."""
    if guard("nested") and _is_nested():
        raise Error(
            "optfuse: Backward(accumulate=...) counts backward passes, and this one runs inside "
            "another (reentrant checkpointing), so that the count would be wrong; use "
            "checkpoint(use_reentrant=False), or mark the passes that only add with "
            "optfuse.accumulate(optimizer). Nothing was updated"
        )


def _is_scaled() -> bool:
    if not running:
        return False
    if torch._C._current_graph_task_id() in running or _is_nested():
        return True
    running.clear()  # left over from a backward that raised
    return False


def _watch(outputs: Any) -> None:
    if isinstance(outputs, Tensor):
        if outputs.requires_grad and not outputs.is_leaf:
            outputs.register_hook(_mark)
    elif isinstance(outputs, (list, tuple)):
        for output in outputs:
            _watch(output)


def install() -> None:
    """Once per process: a loss scaled by GradScaler says so in its backward."""
    scale = torch.amp.GradScaler.scale

    @functools.wraps(scale)
    def scale_and_watch(self: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if self.is_enabled():
            _watch(scaled)
        return scaled

    replace(torch.amp.GradScaler, "scale", scale_and_watch)


def refuse_if_scaled() -> None:
    if guard("scaler") and _is_scaled():
        raise Error(
            "optfuse: this loss was scaled by GradScaler.scale(), so its gradients must be "
            "unscaled before the update, which backward fusion can't wait for; use "
            'optfuse.fuse(optimizer, mode="forward")'
        )
