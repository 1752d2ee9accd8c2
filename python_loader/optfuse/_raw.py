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

_KEY = "TESTING_ONLY_GenericWrapper"
_METHODS = ("data_ptr", "untyped_storage", "__dlpack__")


def _launch(tensor: Any) -> None:
    if isinstance(tensor, Tensor) and torch._C._dispatch_keys(tensor).has(_key()):
        torch.ops.optfuse.touch(tensor)


@functools.cache
def _key() -> Any:
    return torch._C._parse_dispatch_key(_KEY)


def _wrap_method(name: str) -> None:
    method = getattr(Tensor, name)

    @functools.wraps(method)
    def launch_first(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if guard("raw"):
            _launch(self)
        return method(self, *args, **kwargs)

    setattr(Tensor, name, launch_first)


def _wrap_function(owner: Any, name: str, before: Callable[[], None]) -> None:
    function = getattr(owner, name, None)
    if function is None:
        return

    @functools.wraps(function)
    def launch_first(*args: Any, **kwargs: Any) -> Any:
        before()
        return function(*args, **kwargs)

    setattr(owner, name, launch_first)


def install(flush_all: Callable[[], None], swap_and_tell: Callable[[Any], Any]) -> None:
    """Once per process."""
    for name in _METHODS:
        _wrap_method(name)

    # TorchScript's serializer reads the memory of a whole module in C++.
    for name in ("save", "save_to_buffer", "_save_for_mobile", "_save_to_buffer_for_mobile"):
        _wrap_function(torch._C.ScriptModule, name, flush_all)
    _wrap_function(torch._C, "_freeze_module", flush_all)
    torch._C._swap_tensor_impl = swap_and_tell(torch._C._swap_tensor_impl)
