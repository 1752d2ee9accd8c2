# SPDX-License-Identifier: BSD-3-Clause
"""Backward passes that run inside of others, as reentrant checkpointing starts them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch

_NESTED_IN = torch.autograd.function.BackwardCFunction.apply.__code__
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_part_of_a_node: set[types.CodeType] = set()


def is_part_of_a_node(function: Callable[..., Any]) -> None:
    """The backward() of an autograd function calls it, in the pass that it is about."""
    _part_of_a_node.add(function.__code__)


def is_nested() -> bool:
    """Whether this backward was started inside another one, from Python."""
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
