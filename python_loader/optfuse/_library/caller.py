# SPDX-License-Identifier: BSD-3-Clause
"""The place in a script where an error is raised, looked up then and only then."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

_OURS = ("optfuse", "optfuse_layers", "optfuse_tools")
#: Modules of torch that need all gradients after backward(), and what they do.
_ACTS = {"torch.nn.utils.clip_grad": "clipping", "torch.amp.grad_scaler": "unscaling"}


def _module(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__") or "")


def is_ours(module: Any) -> bool:
    """Whether a module of this name is one of ours."""
    return str(module).partition(".")[0] in _OURS


def _is_passed(frame: types.FrameType) -> bool:
    module = _module(frame)
    return is_ours(module) or module.partition(".")[0] == "torch"


def _shown(path: str) -> str:
    """Paths below the working directory begin there."""
    try:
        return path.removeprefix(os.path.join(os.getcwd(), ""))
    except OSError:  # the directory is gone
        return path


def levels_to_caller() -> int:
    """The stacklevel, for whoever calls this, of a warning that names the innermost frame outside
    of torch and optfuse."""
    frame: types.FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and _is_passed(frame):
        frame, level = frame.f_back, level + 1
    return level


def find_caller() -> tuple[str, str]:
    """The deed of torch that needs all gradients, or nothing; and "train.py:12: ", file and line
    of the innermost frame outside of torch and optfuse, or nothing."""
    act = ""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_passed(frame):
            return act, f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}: "
        act = act or _ACTS.get(_module(frame), "")
        frame = frame.f_back
    return act, ""
