# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers of classes without kernels whose own step() is recorded (shim/recorded): step() runs
once, on the optimizer itself, and the operators that it calls run together at its end.
OPTFUSE_RECORDED=1, or fuse(recorded=True), has it so; else such classes are traced."""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from typing import Any, TypeVar

from torch.optim import Optimizer

from optfuse import _process
from optfuse._arguments.modes import Backward, Forward
from optfuse._library.bindings import lib, lib_with_gil
from optfuse._options import RECORDED
from optfuse._patches import raw_memory
from optfuse._rules import RULES

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)
_STEP = "step"
_COUNTS = ("lines", "plays", "at_once", "programs", "operators")


class Step:
    """Takes the place of the method on the optimizer, whose class stays as it is."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.owner = weakref.ref(optimizer)
        self.before = optimizer.__dict__.get(_STEP)  # a scheduler's, which counts calls
        self.records = True
        functools.update_wrapper(self, self.before or type(optimizer).step)

        def function(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        self.__func__ = function  # a scheduler takes it, as of a method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = self.before
        if step is None:
            optimizer = self.owner()
            step, args = type(optimizer).step, (optimizer, *args)
        if not self.records:
            return step(*args, **kwargs)
        return lib_with_gil.of_shim_recorded_step(None, step, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        return Step(memo[id(self.owner())])


def is_recorded(optimizer: Optimizer) -> bool:
    return RECORDED in optimizer.__dict__


def is_asked(recorded: bool | None) -> bool:
    return os.environ.get("OPTFUSE_RECORDED", "") not in ("", "0") if recorded is None else recorded


def can_record(optimizer: Optimizer, mode: Forward | Backward) -> bool:
    """Whether its class has no kernels, and step() is all that is to be fused."""
    rule = RULES.get(type(optimizer))
    if rule is not None and not rule.external:
        return False
    if isinstance(mode, Backward):
        return mode.ddp is None
    return mode.max_grad_norm is None and mode.ddp is None and mode.delay is None


def fuse_recorded(optimizer: OptimizerT) -> OptimizerT:
    """None of the class's code runs."""
    _process.start()
    raw_memory.watch_recorded()
    optimizer.__dict__[RECORDED] = optimizer.__dict__[_STEP] = Step(optimizer)
    return optimizer


def unfuse_recorded(optimizer: Optimizer) -> None:
    step = optimizer.__dict__.pop(RECORDED)
    step.records = False  # somebody may have it
    if optimizer.__dict__.get(_STEP) is step:
        del optimizer.__dict__[_STEP]
        if step.before is not None:
            optimizer.__dict__[_STEP] = step.before


def last_counts() -> dict[str, int]:
    """The counts of this thread's last recorded step()."""
    counts = (ctypes.c_int64 * len(_COUNTS))()
    lib.of_shim_recorded_counts(counts)
    return dict(zip(_COUNTS, counts, strict=True))
