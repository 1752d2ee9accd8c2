# SPDX-License-Identifier: BSD-3-Clause
"""The floor: the bytes of an update, moved where fusion updates, and nothing computed
(bytes_alone.cpp). No fusion that moves the same bytes can be faster. Weights do not change."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from optfuse_tools.ab.variants import NoOptimizer, Wrap

IN_BACKWARD, IN_FORWARD = "bytes alone, backward", "bytes alone, forward"
FLOORS = (IN_BACKWARD, IN_FORWARD)
#: Arrays that an update reads and writes: the parameter and its state.
WRITTEN = {"adamw": 3, "adam": 3, "momentum": 2, "sgd": 1}


def bytes_each(optimizer: str, element: int = 4) -> int:
    """The bytes that the update of one parameter has to move, the gradient included."""
    return element * (2 * WRITTEN[optimizer] + 1)


def path() -> Path:
    """benchmarks/run says where the build is."""
    return Path(os.environ.get("OPTFUSE_BUILD", "")) / "benchmarks" / "libbytes_alone.so"


@cache
def library() -> tuple[Callable[[], Any], Callable[[int, int, int], None]]:
    """The class Floor, and its function update(address, begin, end)."""
    torch.classes.load_library(str(path()))
    update = ctypes.CDLL(str(path())).bytes_alone_update
    update.argtypes, update.restype = [ctypes.c_int64] * 3, None
    return torch.classes.optfuse_floor.Floor, update


def one_tensor(
    optimizer: str, elements: int, dtype: torch.dtype
) -> tuple[Callable[[], None], Tensor, list[Tensor]]:
    """A function that moves the bytes of one update, and the arrays: the gradient, which is
    read, and the parameter and its state, which are written."""
    arrays = [torch.ones(elements, dtype=dtype) for _ in range(1 + WRITTEN[optimizer])]
    (new_floor, update), (gradient, *written) = library(), arrays
    floor = new_floor()
    floor.add(written[0], written[1:])

    def run() -> None:
        written[0].grad = gradient
        floor.take()
        update(floor.address(), 0, 1)

    return run, gradient, written


class BytesAlone(NoOptimizer):
    """Moves the bytes of contiguous float32 parameters on the CPU, with as much state as this
    optimizer has. Gradients are gone before zero_grad(); step() makes no range for PyTorch's
    profiler."""

    def __init__(self, optimizer: Optimizer, name: str) -> None:
        super().__init__(optimizer)
        new_floor, self.update = library()
        self.floor = new_floor()
        self.index = {
            p: self.floor.add(p, [torch.zeros_like(p) for _ in range(WRITTEN[name] - 1)])
            for group in self.param_groups
            for p in group["params"]
        }

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        pass

    step.hooked = True  # type: ignore[attr-defined]


class InBackward(BytesAlone):
    """In a gradient hook, as soon as the gradient is complete."""

    def __init__(self, optimizer: Optimizer, name: str) -> None:
        super().__init__(optimizer, name)
        self.floor.update_in_backward()


class InForward(BytesAlone):
    """When the parameter's module runs next, in a Python hook, which takes a microsecond or two
    a module. The first iteration finds the modules."""

    def __init__(self, optimizer: Optimizer, name: str) -> None:
        super().__init__(optimizer, name)
        self._modules: set[nn.Module] = set()
        self._search = register_module_forward_pre_hook(self._find)

    def _find(self, module: nn.Module, _: object) -> None:
        own = [self.index[p] for p in module.parameters(recurse=False) if p in self.index]
        if own and module not in self._modules:
            self._modules.add(module)
            begin, end = own[0], own[-1] + 1
            assert own == list(range(begin, end))
            update, floor, at = self.update, self.floor, self.floor.address()
            module.register_forward_pre_hook(lambda *_, keep=floor: update(at, begin, end))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._search.remove()
        self.floor.take()

    step.hooked = True  # type: ignore[attr-defined]


def bytes_alone(name: str) -> Mapping[str, Wrap]:
    """The floor's variants for this optimizer; none where the library was not built."""
    if name not in WRITTEN or not path().exists():
        return {}
    return {IN_BACKWARD: partial(InBackward, name=name), IN_FORWARD: partial(InForward, name=name)}
