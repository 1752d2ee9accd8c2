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
from optfuse._patches import after, call_before, replace

_KEY = "TESTING_ONLY_GenericWrapper"
_METHODS = {
    "data_ptr": "access",
    # torch.compile asks for it without reading numbers, so a consumed gradient passes.
    "untyped_storage": "launch",
    "__dlpack__": "access",
    "share_memory_": "access",
}


@functools.cache
def _key() -> Any:
    return torch._C._parse_dispatch_key(_KEY)


def _launch(op: str) -> Callable[..., None]:
    """What to do before a function that takes a tensor first."""

    def launch(tensor: Any, *_: Any, **__: Any) -> None:
        if not guard("raw") or not isinstance(tensor, Tensor):
            return
        if torch._C._dispatch_keys(tensor).has(_key()):
            getattr(torch.ops.optfuse, op)(tensor)

    return launch


def _wrap_to_dlpack() -> None:
    """The functions behind torch.utils.dlpack.to_dlpack and Tensor.__dlpack__."""
    for name in ("_to_dlpack", "_to_dlpack_versioned"):
        function = getattr(torch._C, name, None)
        if function is None:
            continue
        first = after(_launch("access"), function)
        for owner in (torch._C, torch, torch.utils.dlpack):
            for alias in ("to_dlpack", name):
                if getattr(owner, alias, None) is function:
                    replace(owner, alias, first)


def install(flush_all: Callable[[], None], swap_and_tell: Callable[[Any], Any]) -> None:
    """Once per process."""

    def flush(*_: Any, **__: Any) -> None:
        flush_all()

    for name, op in _METHODS.items():
        call_before(Tensor, name, _launch(op))
    _wrap_to_dlpack()

    # TorchScript's serializer reads the memory of a whole module in C++.
    for name in ("save", "save_to_buffer", "_save_for_mobile", "_save_to_buffer_for_mobile"):
        call_before(torch._C.ScriptModule, name, flush)
    call_before(torch._C, "_freeze_module", flush)
    replace(torch._C, "_swap_tensor_impl", swap_and_tell(torch._C._swap_tensor_impl))
