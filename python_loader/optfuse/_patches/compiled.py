# SPDX-License-Identifier: BSD-3-Clause
"""torch.compile: compiled code reads raw memory, and its guards compare
dispatch keys, so everything pending is launched when a compiled callable is
entered, before its guards run.

So it is when an operator begins that takes functions, such as torch.cond() in a module that
torch.export has made. PyTorch dispatches these in Python, by the keys of their tensors, and refuses
those with a key that it does not know."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch._dynamo.eval_frame as eval_frame
import torch._ops

from optfuse._library.bindings import guard
from optfuse._patches import raw_memory
from optfuse._patches.replacing import call_before, replace

_entered = False  # a compiled callable, ever


def install(reveal_all: Callable[[], None], flush_all: Callable[[], None]) -> None:
    """Once per process. Every compiled callable, also one made before, asks
    this function of torch._dynamo for its stance on entry, just before it lets
    compiled code run: the one place that all of them pass."""
    global _entered
    _entered = any(map(_is_in, sys._current_frames().values()))
    stance = eval_frame._is_skip_guard_eval_unsafe_stance

    @functools.wraps(stance)
    def launch_first() -> bool:
        global _entered
        _entered = True
        if guard("compile"):
            reveal_all()
        return stance()

    def flush(_: Any, *values: Any, **named: Any) -> None:
        flush_all()
        for value in (*values, *named.values()):  # gradients, whose marks stay
            raw_memory.use(*(value if isinstance(value, (list, tuple)) else (value,)))

    replace(eval_frame, "_is_skip_guard_eval_unsafe_stance", launch_first)
    call_before(torch._ops.HigherOrderOperator, "__call__", flush)


def running() -> bool:
    """Whether a compiled callable is being executed, and code compiled after a
    graph break may go on without being entered anew."""
    return _entered and _is_in(sys._getframe(1))


def _is_in(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back
    return False
