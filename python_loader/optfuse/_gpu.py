# SPDX-License-Identifier: BSD-3-Clause
"""Parameters on a GPU: which tensors are, the scalars that live there, and CUDA
graphs, which record and replay raw memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from optfuse._native import guard, lib

# A build for tests can be told to take another kind of device for a GPU.
_STAND_IN = hasattr(lib, "of_guard_enabled") and os.environ.get("OPTFUSE_TEST_DEVICE")
GPU: str = _STAND_IN or "cuda"


def is_gpu(device: torch.device) -> bool:
    if device.type == GPU:
        return True
    return bool(_STAND_IN) and device.type == torch._C._get_privateuse1_backend_name()


def is_on_gpu(value: Any) -> bool:
    return isinstance(value, Tensor) and is_gpu(value.device)


def number(value: Any) -> float:
    """A hyper-parameter as a number; 0 for one that lives on a GPU and is handed
    over as a tensor, since reading it would wait for the device."""
    return 0.0 if is_on_gpu(value) else float(value)


def install(flush_all: Callable[[], None], drain_all: Callable[[], None]) -> None:
    """Once per process. What is pending is launched before a graph is captured
    or replayed; what is still running when a capture begins is waited for,
    because a graph can't depend on it."""
    graphs = [getattr(torch.accelerator, "Graph", None)]  # from torch 2.12 on
    if torch.backends.cuda.is_built():
        graphs.append(torch.cuda.CUDAGraph)
    for graph in filter(None, graphs):
        wrap(graph, "capture_begin", drain_all)
        wrap(graph, "capture_end", flush_all, anyway=True)
        wrap(graph, "replay", flush_all)


def wrap(owner: type, name: str, before: Callable[[], None], anyway: bool = False) -> None:
    """Puts a call before a method of a class. anyway: the method is called even
    if the call raises; else the stream would be captured for ever."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def launch_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if guard("graphs"):
                before()
        except BaseException:
            if anyway:
                method(self, *args, **kwargs)
            raise
        return method(self, *args, **kwargs)

    setattr(owner, name, launch_first)
