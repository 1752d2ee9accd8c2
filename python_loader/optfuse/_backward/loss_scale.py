# SPDX-License-Identifier: BSD-3-Clause
"""Backward fusion and loss scaling: the gradients of a scaled loss must be
divided by the scale before the update, so backward fusion can't use them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from optfuse._library.bindings import Error, guard
from optfuse._patches.nested_passes import is_nested
from optfuse._patches.replacing import replace

#: Graph tasks whose loss was scaled. The library looks whether there are some.
running: set[int] = set()


def _mark(_: Tensor) -> None:
    task = torch._C._current_graph_task_id()
    running.add(task)
    torch.autograd.Variable._execution_engine.queue_callback(lambda: running.discard(task))


def refuse_nested() -> None:
    """At the beginning of a pass that is counted."""
    if guard("nested") and is_nested():
        raise Error(
            "optfuse: Backward(accumulate=...) counts backward passes, and this one runs inside "
            "another (reentrant checkpointing), so that the count would be wrong; use "
            "checkpoint(use_reentrant=False), or mark the passes that only add with "
            "optfuse.accumulate(optimizer). Nothing was updated"
        )


def _is_scaled() -> bool:
    if not running:
        return False
    if torch._C._current_graph_task_id() in running or is_nested():
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
