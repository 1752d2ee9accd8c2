# SPDX-License-Identifier: BSD-3-Clause
"""Whether anybody watches step() and zero_grad(). PyTorch wraps both in a range for its
profiler, which in training takes as long as the updates of a hundred small parameters, whether
somebody profiles or not."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from optfuse._native import lib

_monitor: Any
try:  # it notes ranges itself, since 2.13
    from torch.profiler import _cupti_monitor as _monitor
except ImportError:
    _monitor = None


def is_profiled() -> bool:
    """By PyTorch's profiler or by another observer of its functions."""
    is_monitored = _monitor is not None and _monitor._monitor_singleton is not None
    return is_monitored or lib.of_shim_is_profiled()


def looks_at_tensors() -> bool:
    """Whether a profiler that is at work notes the addresses of tensors, of those that operators
    get or, with stacks, those of modules and optimizers. It asks the tensors themselves for
    them, which those with a pending update refuse."""
    return lib.of_shim_inputs_are_profiled() or type(sys.getprofile()).__name__ == "TraceContext"


def install(flush_all: Callable[[], None]) -> None:
    """Once per process: nothing is pending when a profiler starts that looks at tensors."""
    profiler: Any = torch.autograd.profiler.profile
    start = profiler._start_trace

    @functools.wraps(start)
    def launch_and_start(self: Any) -> None:
        if self.record_shapes or self.with_stack:
            flush_all()
        start(self)

    observe = torch.profiler.ExecutionTraceObserver.start

    @functools.wraps(observe)
    def launch_and_observe(self: torch.profiler.ExecutionTraceObserver) -> None:
        flush_all()
        observe(self)

    profiler._start_trace = launch_and_start
    torch.profiler.ExecutionTraceObserver.start = launch_and_observe  # type: ignore[method-assign]


def has_hooks(optimizer: Optimizer) -> bool:
    """To be called before or after its step()."""
    return bool(
        _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
    )
