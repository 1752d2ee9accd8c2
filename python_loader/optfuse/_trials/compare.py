# SPDX-License-Identifier: BSD-3-Clause
"""Deep copies and deep comparisons of what an optimizer has: its options, attributes and
state. Tensors are compared by bits."""

from __future__ import annotations

import copy
import pickle
from collections import deque
from typing import Any

import torch
from torch import Tensor

from optfuse._library.bindings import Error

DEEPEST = 50


def deep_copy(value: Any, what: str, shared: dict[int, Any] | None = None) -> Any:
    """shared: objects by their id that the copy has, too."""
    try:
        return copy.deepcopy(value, dict(shared or {}))
    except Exception as error:
        raise Error(
            f"optfuse: {what} can't be copied, so step() can't be tried without them: "
            f"{type(error).__name__}: {error}. Use the optimizer as it is"
        ) from error


def difference(name: str, ours: Any, theirs: Any, depth: int = 0) -> str | None:
    """The name of the first part that differs."""
    if ours is theirs:
        return None
    if type(ours) is not type(theirs) or depth > DEEPEST:
        return name
    if isinstance(ours, Tensor):
        return None if same_bits(ours, theirs) else name
    if isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return f"{name} (its keys)"
        parts = [(key, ours[key], theirs[key]) for key in ours]
    elif isinstance(ours, list | tuple | deque):
        if len(ours) != len(theirs):
            return f"{name} (its length)"
        parts = [(i, *pair) for i, pair in enumerate(zip(ours, theirs, strict=True))]
    elif type(ours).__eq__ is object.__eq__ and hasattr(ours, "__dict__"):
        return difference(name, vars(ours), vars(theirs), depth + 1)
    else:
        return None if _are_equal(ours, theirs) else name
    for key, mine, their in parts:
        place = difference("", mine, their, depth + 1)
        if place is not None:
            return f"{name}[{'a parameter' if isinstance(key, Tensor) else repr(key)}]{place}"
    return None


def _are_equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or bool(a != a and b != b) or pickle.dumps(a) == pickle.dumps(b)
    except Exception:  # arrays and the like have no one answer
        try:
            return pickle.dumps(a) == pickle.dumps(b)
        except Exception:
            return False


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN equals NaN whatever its payload; -0 differs from +0."""
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    a, b = a.detach().contiguous(), b.detach().contiguous()
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if torch.equal(_bytes(a), _bytes(b)):  # most are
        return True
    if not a.is_floating_point():
        return False
    nans = a.isnan() & b.isnan()
    return torch.equal(_bytes(a.masked_fill(nans, 0)), _bytes(b.masked_fill(nans, 0)))


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor, whatever strides its dimensions of one element have."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
