# SPDX-License-Identifier: BSD-3-Clause
"""torch.compile: compiled code reads raw memory, and its guards compare
dispatch keys, so everything pending is launched when a compiled callable is
entered, before its guards run."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType

import torch._dynamo.eval_frame as eval_frame

from optfuse._library.bindings import guard
from optfuse._patches.replacing import replace

_entered = False  # a compiled callable, ever


def install(flush_all: Callable[[], None]) -> None:
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
            flush_all()
        return stance()

    replace(eval_frame, "_is_skip_guard_eval_unsafe_stance", launch_first)


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
