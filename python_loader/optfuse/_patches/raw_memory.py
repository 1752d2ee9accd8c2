# SPDX-License-Identifier: BSD-3-Clause
"""Ways from Python past the dispatcher: to a tensor's raw memory, and to its dispatch key.

An operator on a pending tensor launches its update by itself. These few are none, so each launches
first. Most are written in C, and a script may have bound them before optfuse came (`from
torch.utils.dlpack import to_dlpack`)."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary

from optfuse._library.bindings import OK, Error, check, guard, lib, lib_with_gil, message
from optfuse._patches.replacing import call_before, call_first, replace

_KEY = "TESTING_ONLY_GenericWrapper"
_IN_C = {
    Tensor: ("data_ptr", "const_data_ptr", "apply_", "map_", "map2_"),
    torch._C: ("_data_address", "_is_cow_tensor"),
}
_IN_A_STEP = torch._C.TensorBase.data, torch._C.TensorBase.grad, torch._C.TensorBase._version
_EXPORTS = ("_to_dlpack", "_to_dlpack_versioned")  # of torch._C
#: torch.compile asks for storages to tell aliases apart, and reads none.
_ALIASES = "torch._subclasses.meta_utils"


@functools.cache
def _key() -> Any:
    return torch._C._parse_dispatch_key(_KEY)


_recorded = False  # some optimizer's step() is
#: An event stands for what is on a stream by then, and who waits for a stream may free memory
#: that it has used. A backward pass works on threads of its own for each GPU.
_ORDERS = (
    (torch.Event, ("record",)),
    (torch.Stream, ("record_event", "wait_stream", "synchronize", "query")),
    (getattr(torch._C, "_CudaEventBase", None), ("record",)),
    (getattr(torch._C, "_CudaStreamBase", None), ("synchronize", "query")),
    (torch._C, ("_cuda_synchronize", "_accelerator_synchronizeDevice")),
    (torch.autograd.Variable._execution_engine, ("run_backward",)),
)


def watch_recorded() -> None:
    """A step() that is recorded is to come: its lines run before somebody has an address, and
    before somebody asks what is on a stream."""
    global _recorded
    if _recorded:
        return
    watch = lib_with_gil.of_shim_watch_attributes
    if watch(*_IN_A_STEP, object.__basicsize__) != OK:
        raise Error(f"optfuse: {message()}")
    has_gpus = torch.version.cuda is not None or "OPTFUSE_TEST_DEVICE" in os.environ
    for owner, names in _ORDERS if has_gpus else ():
        for name in names:
            if not isinstance(owner, type) or name in vars(owner):  # and no base class's
                call_first(owner, name, _play_first)
    _recorded = True


def _play_first(*_: Any, **__: Any) -> None:
    if guard("recorded_order"):
        play_recorded(orders=True)


def _is_recording() -> bool:
    return _recorded and lib.of_shim_is_recording()  # type: ignore[no-any-return]


def play_recorded(ends: bool = False, orders: bool = False) -> None:
    """Runs what this thread's step() has recorded; ends: the rest of step() is not; orders: it
    waits for streams."""
    if _is_recording():
        check(lib_with_gil.of_shim_play_recorded(ends, orders))


def _is_marked(tensor: Any) -> bool:
    """Or may be written by a step() that is recorded."""
    if not isinstance(tensor, Tensor):
        return False
    is_marked: bool = torch._C._dispatch_keys(tensor).has(_key())
    return is_marked or (_is_recording() and not _is_python(tensor))


def _launch(op: str) -> Callable[..., None]:
    """Does op to marked tensors that a function is about to take."""

    def launch(*values: Any, **named: Any) -> None:
        if not guard("raw"):
            return
        for value in (*values, *named.values()) if named else values:
            if _is_marked(value):
                getattr(torch.ops.optfuse, op)(value)

    return launch


def _give_storage(tensor: Any) -> None:
    """The only way from Python to a tensor's storage. That of a consumed gradient is given to
    nobody who could read it: some of a storage's functions look past every seal, and is_shared()
    would end the process."""
    asks_for_aliases = sys._getframe(1).f_globals.get("__name__") == _ALIASES
    _launch("launch" if asks_for_aliases else "access")(tensor)


def use(*values: Any) -> None:
    _launch("access")(*values)


def launch_gradients(params: Iterable[Tensor]) -> None:
    """Before C++ code asks the gradients of these parameters for their memory."""
    _launch("access")(*(param.grad for param in params))


def _like(tensor: Any = None, *_: Any, **__: Any) -> Tensor | None:
    """For a function that makes a tensor of this one's dtype on its device, and takes the mark for
    a device: a tensor without the mark. Not for a class that answers the function by itself."""
    if not guard("raw") or not isinstance(tensor, Tensor) or has_torch_function_unary(tensor):
        return None
    if not torch._C._dispatch_keys(tensor).has(_key()):
        return None
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _exported(tensor: Any = None, *values: Any, **named: Any) -> Tensor | None:
    """For a function that gives memory away for as long as somebody keeps it: an alias, which is
    seen as another user of the memory. PyTorch 2.13 gives away the tensor itself."""
    if "data" in named:
        raise Error(
            "optfuse: torch exports this tensor by DLPack; give it by position, not as data="
        )
    _launch("access")(tensor, *values, **named)
    if not isinstance(tensor, Tensor) or _is_python(tensor):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def _is_python(tensor: Tensor) -> bool:
    """Whether a class of Python answers its operators."""
    return torch._C._dispatch_keys(tensor).has(torch._C._parse_dispatch_key("Python"))


def install(flush_all: Callable[[], None], swap_and_tell: Callable[[Any], Any]) -> None:
    """Once per process."""

    def flush(*_: Any, **__: Any) -> None:
        flush_all()

    access = _launch("access")
    for owner, names in _IN_C.items():
        for name in names:
            call_first(owner, name, access)
    for name in _EXPORTS:
        call_first(torch._C, name, _exported)
    call_first(Tensor, "untyped_storage", _give_storage)
    for name in ("new", "new_tensor"):
        call_first(Tensor, name, _like)
    for name in ("__dlpack__", "share_memory_"):
        call_before(Tensor, name, access)

    # TorchScript's serializer reads the memory of a whole module in C++.
    for name in ("save", "save_to_buffer"):
        call_before(torch._C.ScriptModule, name, flush)
    replace(torch._C, "_swap_tensor_impl", swap_and_tell(torch._C._swap_tensor_impl))
