# SPDX-License-Identifier: BSD-3-Clause
"""Whether anybody watches step() and zero_grad(). PyTorch wraps both in a range for its
profiler, which in training takes as long as the updates of a hundred small parameters, whether
somebody profiles or not.

A profiler that records shapes or stacks notes the addresses of tensors: of those that operators
get, of those that modules and optimizers have. It asks the tensors themselves for them, past
the dispatcher, where those with a pending update refuse. So nothing is pending while it is at
work, and consumed gradients give a null pointer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from optfuse._library.bindings import lib
from optfuse._library.caller import is_ours
from optfuse._patches.replacing import call_before

try:  # the monitor notes ranges itself, since 2.13
    from torch.profiler._cupti_monitor import get_monitor
except ImportError:

    def get_monitor() -> Any:  # type: ignore[misc]
        return None


_exposed = False  # consumed gradients give a null pointer


def stranger(function: Any) -> str | None:
    """The name of what is neither PyTorch's nor ours, of a function and those that it wraps."""
    while function is not None:
        if not isinstance(function, FunctionType):  # a proxy may have a function's attributes
            return f"an object of {type(function).__qualname__}"
        home = function.__globals__.get("__name__") or ""
        if home.partition(".")[0] != "torch" and not is_ours(home):
            return f"{home}.{function.__qualname__}"
        function = getattr(function, "__wrapped__", None)
    return None


#: None: another function is in the place of PyTorch's.
ZERO_GRAD = None if stranger(Optimizer.zero_grad) else Optimizer.zero_grad


def is_observed() -> bool:
    """Whether a profiler is at work, as far as PyTorch's Python knows."""
    return _exposed or get_monitor() is not None


def is_watched() -> bool:
    """Whether PyTorch's profiler or another observer of its functions is at work."""
    return is_observed() or lib.of_shim_is_profiled()


#: Global hooks of ours that are done. PyTorch can't lose one while it calls them.
_retired: list[RemovableHandle] = []


def retire(hook: RemovableHandle) -> None:
    """From inside of the hook: it is removed before the next step() of an optimizer of ours."""
    _retired.append(hook)


def remove_retired() -> None:
    """Outside of any step()."""
    while _retired:
        _retired.pop().remove()


def has_hooks_before(optimizer: Optimizer) -> bool:
    """Whether its step() calls any of others before it updates."""
    hooks = *_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()
    return any(not is_ours(getattr(h, "__module__", "")) for h in hooks)


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether its step() calls any, before it updates or afterwards. One of ours for all may say
    whom it concerns."""
    if _retired:
        remove_retired()
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return True
    hooks = *_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()
    return bool(hooks) and any(getattr(hook, "concerns", bool)(optimizer) for hook in hooks)


def _expose(exposed: bool) -> None:
    global _exposed
    if exposed != _exposed:
        lib.of_shim_seal_consumed(not exposed)
    _exposed = exposed


def addresses_are_noted() -> bool:
    """Whether a profiler is at work on this thread that notes the addresses of tensors."""
    noted: bool = lib.of_shim_inputs_are_profiled()
    noted = noted or type(sys.getprofile()).__name__ == "TraceContext"
    _expose(noted)
    return noted


def install(flush_all: Callable[[], None]) -> None:
    """Once per process: nothing is pending when a profiler starts that notes addresses."""

    def prepare(*_: Any, **__: Any) -> None:
        flush_all()
        _expose(True)

    def prepare_if_noted(profiler: Any, *_: Any, **__: Any) -> None:
        if profiler.record_shapes or profiler.with_stack:
            prepare()

    call_before(torch.autograd.profiler.profile, "_start_trace", prepare_if_noted)
    call_before(torch.autograd.profiler.profile, "toggle_collection_dynamic", prepare_if_noted)
    call_before(torch.profiler.ExecutionTraceObserver, "start", prepare)
