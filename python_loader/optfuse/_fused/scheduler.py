# SPDX-License-Identifier: BSD-3-Clause
"""A learning-rate scheduler replaces the optimizer's step by a wrapper that
counts calls. One built before fuse() has wrapped the stock step, so it is
wrapped again around the class's present one."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch.optim import Optimizer

from optfuse._class_code import WRAPPED
from optfuse._library.bindings import Error
from optfuse._patches.profiling import stranger
from optfuse._rules import RULES


def _counting(optimizer: Optimizer) -> Any:
    function = type(optimizer).step
    owner = weakref.ref(optimizer)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        target: Any = owner()
        target._opt_called = True
        return function(target, *args, **kwargs)

    vars(wrapper)[WRAPPED] = True
    return wrapper


def check_step(optimizer: Optimizer) -> None:
    """Raises optfuse.Error if something has replaced the step() of its class."""
    stock = type(optimizer)
    other = stranger(stock.step) if stock in RULES else None  # others are called as they are
    if other is not None:
        raise Error(
            f"optfuse: the step() of {stock.__module__}.{stock.__qualname__} was replaced by "
            f"{other}, which fuse() would silently bypass; derive a class with that step(), "
            "which is recorded then, or use the optimizer as it is"
        )


def rewrap(optimizer: Optimizer) -> None:
    """After the optimizer's class has changed."""
    if "step" in optimizer.__dict__:
        optimizer.__dict__["step"] = _counting(optimizer)
