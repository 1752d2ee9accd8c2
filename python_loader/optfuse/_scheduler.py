# SPDX-License-Identifier: BSD-3-Clause
"""A learning-rate scheduler replaces the optimizer's step by a wrapper that
counts calls. One built before fuse() has wrapped the stock step, so it is
wrapped again around the class's present one."""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any

from torch.optim import Optimizer

from optfuse._native import Error

_WRAPPED = "_wrapped_by_lr_sched"


def _counting(optimizer: Optimizer) -> Any:
    function = type(optimizer).step
    owner = weakref.ref(optimizer)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        target: Any = owner()
        target._opt_called = True
        return function(target, *args, **kwargs)

    vars(wrapper)[_WRAPPED] = True
    return wrapper


def check_step(optimizer: Optimizer) -> None:
    """Raises optfuse.Error if something unknown has replaced step()."""
    own = optimizer.__dict__.get("step")
    if own is not None and not getattr(own, _WRAPPED, False):
        kind = "method" if isinstance(own, types.MethodType) else type(own).__name__
        raise Error(
            f"optfuse: optimizer.step was replaced on this object by a {kind}, which fuse() "
            "would silently bypass; fuse the optimizer first and replace step() afterwards"
        )


def rewrap(optimizer: Optimizer) -> None:
    """After the optimizer's class has changed."""
    if "step" in optimizer.__dict__:
        optimizer.__dict__["step"] = _counting(optimizer)
