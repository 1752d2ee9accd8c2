# SPDX-License-Identifier: BSD-3-Clause
"""Takes gradients that backward fusion has used up out of the way: for good, or for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def _consumed(params: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The parameters with such a gradient, and that gradient."""
    pairs = [(param, param.grad) for param in params if param.grad is not None]
    with torch._C._DisableTorchDispatch():  # of DTensors
        known = torch.ops.optfuse.are_consumed([grad for _, grad in pairs]) if pairs else []
    return [pair for pair, is_consumed in zip(pairs, known, strict=True) if is_consumed]


def drop(params: Iterable[Tensor]) -> None:
    for param, _ in _consumed(params):
        param.grad = None


@contextlib.contextmanager
def aside(params: Iterable[Tensor], others: bool = False) -> Iterator[None]:
    """They are not there meanwhile; others: nor is any other."""
    pairs = [(param, param.grad) for param in params] if others else _consumed(params)
    for param, _ in pairs:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in pairs:
            param.grad = grad
