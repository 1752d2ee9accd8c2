# SPDX-License-Identifier: BSD-3-Clause
"""torch.autograd.graph.allow_mutation_on_saved_tensors(): PyTorch copies a tensor that a graph has
saved when an operator is about to write to it, and sees no operator where our updates write."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import graph
from torch.optim import Optimizer

from optfuse._library.bindings import Error

_IN_BACKWARD = (
    "optfuse: inside of torch.autograd.graph.allow_mutation_on_saved_tensors() a graph goes on "
    "with the weights that it has saved, and backward fusion would change them under it; use "
    'optfuse.fuse(optimizer, mode="forward"). Nothing was updated'
)


def tell_of_writes(optimizer: Optimizer, in_backward: bool) -> None:
    """Before updates are made, while a dispatch mode is at work, which may be that one."""
    if not getattr(graph, "_allow_mutation_on_saved_tensors_enabled", False):
        return
    if in_backward:
        raise Error(_IN_BACKWARD)
    state = optimizer.state
    params = (p for group in optimizer.param_groups for p in group["params"])
    with torch.no_grad():
        for param in params:
            if param.grad is not None:
                _write_nothing(param, *state.get(param, {}).values())


def _write_nothing(*values: object) -> None:
    for value in values:
        if isinstance(value, Tensor):
            value.copy_(value)
