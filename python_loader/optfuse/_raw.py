# SPDX-License-Identifier: BSD-3-Clause
"""Ways from Python to a tensor's raw memory that pass no operator.

An operator on a pending tensor launches its update by itself. These few don't
go through the dispatcher, so each is wrapped to launch first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from optfuse._native import guard
from optfuse._patches import replace

_KEY = "TESTING_ONLY_GenericWrapper"
_METHODS = {
    "data_ptr": "access",
    # torch.compile asks for it without reading numbers, so a consumed gradient passes.
    "untyped_storage": "launch",
    "__dlpack__": "access",
    "share_memory_": "access",
}


def _launch(tensor: Any, op: str = "access") -> None:
    if isinstance(tensor, Tensor) and torch._C._dispatch_keys(tensor).has(_key()):
        getattr(torch.ops.optfuse, op)(tensor)


@functools.cache
def _key() -> Any:
    return torch._C._parse_dispatch_key(_KEY)


def _wrap_method(name: str, op: str) -> None:
    method = getattr(Tensor, name)

    @functools.wraps(method)
    def launch_first(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if guard("raw"):
            _launch(self, op)
        return method(self, *args, **kwargs)

    replace(Tensor, name, launch_first)


def _wrap_function(owner: Any, name: str, before: Callable[[], None]) -> None:
    function = getattr(owner, name, None)
    if function is None:
        return

    @functools.wraps(function)
    def launch_first(*args: Any, **kwargs: Any) -> Any:
        before()
        return function(*args, **kwargs)

    replace(owner, name, launch_first)


def _wrap_to_dlpack() -> None:
    """The functions behind torch.utils.dlpack.to_dlpack and Tensor.__dlpack__."""
    for name in ("_to_dlpack", "_to_dlpack_versioned"):
        function = getattr(torch._C, name, None)
        if function is None:
            continue
        first = _launching_first(function)
        for owner in (torch._C, torch, torch.utils.dlpack):
            for alias in ("to_dlpack", name):
                if getattr(owner, alias, None) is function:
                    replace(owner, alias, first)


def _launching_first(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def launch_first(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if guard("raw"):
            _launch(tensor)
        return function(tensor, *args, **kwargs)

    return launch_first


def install(flush_all: Callable[[], None], swap_and_tell: Callable[[Any], Any]) -> None:
    """Once per process."""
    for name, op in _METHODS.items():
        _wrap_method(name, op)
    _wrap_to_dlpack()

    # TorchScript's serializer reads the memory of a whole module in C++.
    for name in ("save", "save_to_buffer", "_save_for_mobile", "_save_to_buffer_for_mobile"):
        _wrap_function(torch._C.ScriptModule, name, flush_all)
    _wrap_function(torch._C, "_freeze_module", flush_all)
    replace(torch._C, "_swap_tensor_impl", swap_and_tell(torch._C._swap_tensor_impl))
