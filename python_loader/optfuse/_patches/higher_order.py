# SPDX-License-Identifier: BSD-3-Clause
"""Operators that take functions, such as torch.cond() in a module that torch.export has made.
PyTorch dispatches them in Python, by the keys of their tensors, and refuses those with a key that
it does not know. So nothing is pending when one of them begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._ops

from optfuse._patches.replacing import call_before


def install(flush_all: Callable[[], None]) -> None:
    """Once per process."""

    def flush(*_: Any, **__: Any) -> None:
        flush_all()

    call_before(torch._ops.HigherOrderOperator, "__call__", flush)
