# SPDX-License-Identifier: BSD-3-Clause
"""Runs trials on a thread of their own. A thread has OpenMP's number of threads until an operator
of PyTorch's first shares out work there, and products of matrices round by that number: a trial
must not set it before the script does."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer

Trial = TypeVar("Trial", bound=Callable[..., Any])


def sets_no_threads(trial: Trial) -> Trial:
    """A trial whose first argument is an optimizer, or groups. It runs on a thread of its own where
    this one's number would change."""

    @functools.wraps(trial)
    def run(first: Any, *args: Any) -> Any:
        groups = first.param_groups if isinstance(first, Optimizer) else first
        if _has_modes() or _is_on_gpu(groups) or not torch.ops.optfuse.would_set_threads():
            return trial(first, *args)
        return _on_its_own_thread(lambda: trial(first, *args))

    return cast(Trial, run)


def _has_modes() -> bool:
    """Whether operators do something else on this thread than on a new one."""
    return bool(
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch.is_inference_mode_enabled()
        or not torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
    )


def _is_on_gpu(groups: Iterable[dict[str, Any]]) -> bool:
    """Whether a parameter is on one: each thread has a GPU and a stream of its own."""
    return any(not p.is_cpu for group in groups for p in group["params"])


def _on_its_own_thread(work: Callable[[], Any]) -> Any:
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=copy_context().run, args=(run,))
    thread.start()
    _wait_for(thread)
    return done.result()


def _wait_for(thread: threading.Thread) -> None:
    """An interrupt ends no trial half-way."""
    interrupt = None
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
