# SPDX-License-Identifier: BSD-3-Clause
"""Deep comparisons of what an optimizer has: its options, attributes and state. Tensors are
compared by bits."""

from __future__ import annotations

import pickle
from collections import deque
from typing import Any

import torch
from torch import Tensor

DEEPEST = 50
_CONSTANT = frozenset((bool, int, float, complex, str, bytes, type(None)))
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    a, b = a.detach(), b.detach()
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    integers = _INTEGERS[a.element_size()]
    bits, others = a.view(integers), b.view(integers)
    if torch.equal(bits, others):  # most are
        return True
    return a.is_floating_point() and bool(((bits == others) | (a.isnan() & b.isnan())).all())
