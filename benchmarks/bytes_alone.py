# SPDX-License-Identifier: BSD-3-Clause
"""The floor of fusion in training: what moves an update's bytes where fusion updates, and
computes nothing (bytes_alone.cpp). The weights stay as they are."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from floor import WRITTEN
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from optfuse._ab.variants import NoOptimizer, Wrap

IN_BACKWARD, IN_FORWARD = "bytes alone, backward", "bytes alone, forward"
FLOORS = (IN_BACKWARD, IN_FORWARD)


def _path() -> Path:
    """The build is where benchmarks/run says."""
    return Path(os.environ.get("OPTFUSE_BUILD", "")) / "benchmarks" / "libbytes_alone.so"


@cache
def library() -> Any:
    torch.ops.load_library(str(_path()))
    opened = ctypes.CDLL(str(_path()))
    for function in (opened.bytes_alone_take, opened.bytes_alone_move, opened.bytes_alone_drop):
        function.argtypes = [ctypes.c_int64] * 2
        function.restype = None
    return opened


class BytesAlone(NoOptimizer):
    """Of contiguous float32 parameters on the CPU, with the state of the optimizer of this
    name. Gradients are gone before zero_grad(), and step() has no range for PyTorch's profiler,
    which makes one for "no optimizer", too."""

    def __init__(self, optimizer: Optimizer, name: str) -> None:
        super().__init__(optimizer)
        self._library = library()
        self._arrays = [
            (p, [torch.zeros_like(p) for _ in range(WRITTEN[name] - 1)])
            for group in self.param_groups
            for p in group["params"]
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        pass

    step.hooked = True  # type: ignore[attr-defined]


class InBackward(BytesAlone):
    """In hooks, as soon as a gradient is complete."""

    def __init__(self, optimizer: Optimizer, name: str) -> None:
        super().__init__(optimizer, name)
        torch.ops.optfuse_floor.begin()
        for param, state in self._arrays:
            torch.ops.optfuse_floor.attach(param, state)


class InForward(BytesAlone):
    """When a module that has the parameter next runs: in Python's hooks, which take a
    microsecond or two a module. Modules are found in the first iteration."""

    def __init__(self, optimizer: Optimizer, name: str) -> None:
        super().__init__(optimizer, name)
        add = torch.ops.optfuse_floor.add
        self._index = {param: add(param, state) for param, state in self._arrays}
        self._ends = min(self._index.values()), max(self._index.values()) + 1
        weakref.finalize(self, self._library.bytes_alone_drop, *self._ends)
        self._known: set[nn.Module] = set()
        self._search = register_module_forward_pre_hook(self._find)

    def _find(self, module: nn.Module, _: object) -> None:
        own: list[Tensor] = [p for p in module.parameters(recurse=False) if p in self._index]
        if own and module not in self._known:
            self._known.add(module)
            begin, end = self._index[own[0]], self._index[own[-1]] + 1
            assert [self._index[p] for p in own] == list(range(begin, end))
            move = self._library.bytes_alone_move
            module.register_forward_pre_hook(lambda *_: move(begin, end))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._search.remove()
        self._library.bytes_alone_take(*self._ends)

    step.hooked = True  # type: ignore[attr-defined]


def bytes_alone(name: str) -> Mapping[str, Wrap]:
    """The variants for this optimizer; none where there is no such floor."""
    if name not in WRITTEN or not _path().exists():
        return {}
    return {
        IN_BACKWARD: partial(InBackward, name=name),
        IN_FORWARD: partial(InForward, name=name),
    }
