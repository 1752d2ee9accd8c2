# SPDX-License-Identifier: BSD-3-Clause
"""Backward fusion and loss scaling: the gradients of a scaled loss must be
divided by the scale before the update, so backward fusion can't use them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from optfuse._native import Error, guard

_scaled_backward = -1  # graph task whose loss was scaled


def _mark(_: Tensor) -> None:
    global _scaled_backward
    _scaled_backward = torch._C._current_graph_task_id()


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

    torch.amp.GradScaler.scale = scale_and_watch  # type: ignore[method-assign]


def refuse_if_scaled() -> None:
    if guard("scaler") and _scaled_backward == torch._C._current_graph_task_id() != -1:
        raise Error(
            "optfuse: this loss was scaled by GradScaler.scale(), so its gradients must be "
            "unscaled before the update, which backward fusion can't wait for; use "
            'optfuse.fuse(optimizer, mode="forward")'
        )
