# SPDX-License-Identifier: BSD-3-Clause
"""Takes away the kernels of aten::linear and aten::conv2d that see layers (shim/layers/tap.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_KEYS = ("AutogradCPU", "AutogradCUDA", "AutogradPrivateUse1")


def leave(stop: Callable[..., object], *args: Any) -> None:
    """stop: takes the kernels away, if nobody else has layers. What compiles in Python remembers
    where an operator has kernels; once ours have gone it would trace one that has no gradients."""
    stop(*args)
    for operator in (torch.ops.aten.linear.default, torch.ops.aten.conv2d.default):
        for key in _KEYS:
            operator._uncache_dispatch(getattr(torch._C.DispatchKey, key))
