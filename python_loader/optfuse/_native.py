# SPDX-License-Identifier: BSD-3-Clause
"""The compiled library's C functions (shim/shim.h), typed for ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from optfuse._library import load

FORWARD, BACKWARD = 0, 1
OK, NEEDS_STATE = 0, 3
EVENT_BACKWARD, EVENT_STATE, EVENT_REDUCED, EVENT_APPLY = range(4)
DONE = 1  # what the callback returns
UPDATE, ATTACH = 1, 2  # what of_shim_todo() says
DTYPES = ("float32", "float64", "bfloat16", "float16")


class Error(RuntimeError):
    """What optfuse refuses to do, with the parameter, the reason and what to do."""

    __module__ = "optfuse"  # where users find it, and tracebacks name it


class Counts(ctypes.Structure):
    """of_counts of plugin/optfuse.h."""

    _fields_ = [
        ("created", ctypes.c_uint64),
        ("at_once", ctypes.c_uint64),
        ("at_use", ctypes.c_uint64),
        ("at_close", ctypes.c_uint64),
        ("pending", ctypes.c_uint64),
        ("launches", ctypes.c_uint64),
        ("in_flight", ctypes.c_uint64),
        ("threads_seen", ctypes.c_bool),
        ("past_caches", ctypes.c_bool),
    ]


Doubles = ctypes.POINTER(ctypes.c_double)
Sizes = ctypes.POINTER(ctypes.c_size_t)

_PROTOTYPES: dict[str, tuple[object, list[object]]] = {
    "of_error_message": (ctypes.c_char_p, []),
    "of_any_pending": (ctypes.c_bool, []),
    "of_flush_all": (ctypes.c_int, []),
    "of_shim_init": (ctypes.c_int, [ctypes.c_void_p, ctypes.py_object]),
    "of_shim_rules": (ctypes.c_char_p, []),
    "of_shim_plan_new": (
        ctypes.c_int,
        [
            ctypes.c_char_p,
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_size_t,
            ctypes.c_size_t,
            ctypes.POINTER(ctypes.c_void_p),
        ],
    ),
    "of_shim_plan_free": (None, [ctypes.c_void_p]),
    "of_shim_clear": (ctypes.c_int, [ctypes.c_void_p]),
    "of_shim_group": (
        ctypes.c_int,
        [ctypes.c_void_p, ctypes.c_size_t, Doubles, ctypes.c_size_t],
    ),
    "of_shim_step": (ctypes.c_int, [ctypes.c_void_p, Sizes, ctypes.c_size_t, Sizes]),
    "of_shim_flush": (
        ctypes.c_int,
        [ctypes.c_void_p, ctypes.c_bool, ctypes.POINTER(ctypes.c_bool)],
    ),
    "of_shim_todo": (ctypes.c_int, [ctypes.c_void_p]),
    "of_shim_is_updated": (ctypes.c_bool, [ctypes.c_void_p, ctypes.c_size_t]),
    "of_shim_unconfirmed": (ctypes.c_bool, [ctypes.c_void_p]),
    "of_shim_update_beside": (None, [ctypes.c_void_p]),
    "of_shim_add_only": (None, [ctypes.c_void_p, ctypes.c_int]),
    "of_shim_restart_count": (None, [ctypes.c_void_p]),
    "of_shim_stop_deferring": (None, [ctypes.c_void_p]),
    "of_shim_counts": (ctypes.c_int, [ctypes.c_void_p, ctypes.POINTER(Counts)]),
    "of_shim_isa": (ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_int]),
    "of_shim_is_profiled": (ctypes.c_bool, []),
    "of_shim_inputs_are_profiled": (ctypes.c_bool, []),
    "of_shim_seal_consumed": (None, [ctypes.c_bool]),
}
_WITH_GIL: dict[str, tuple[object, list[object]]] = {
    "of_shim_drop_gradients": (None, [ctypes.c_void_p]),
    "of_shim_same_items": (ctypes.c_bool, [ctypes.py_object] * 2),
    "of_shim_same_groups": (ctypes.c_bool, [ctypes.py_object] * 4),
    "of_shim_same_state": (ctypes.c_bool, [ctypes.py_object] * 4),
}


def _typed(library: ctypes.CDLL, prototypes: dict[str, tuple[object, list[object]]]) -> ctypes.CDLL:
    for name, (result, arguments) in prototypes.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


lib = _typed(load(), _PROTOTYPES)
lib_with_gil = _typed(ctypes.PyDLL(lib._name, handle=lib._handle), _WITH_GIL)


def message() -> str:
    """The text of the last failure on this thread."""
    return lib.of_error_message().decode(errors="replace")


def check(status: int) -> None:
    if status != OK:
        raise Error(f"optfuse: {message()}")


_SWITCHABLE = hasattr(lib, "of_guard_enabled")  # a look-up in vain takes microseconds
if _SWITCHABLE:
    _typed(lib, {"of_guard_enabled": (ctypes.c_bool, [ctypes.c_char_p])})


def guard(name: str) -> bool:
    """True, unless a test-only build of the library switched this check off."""
    return not _SWITCHABLE or lib.of_guard_enabled(name.encode())


_on_event: Callable[[int, int, int], int] | None = None  # so that it lives


def start(on_event: Callable[[int, int, int], int]) -> None:
    """Once per process: registers the first-use fallback with PyTorch, and
    checks that errors raised in the library arrive as optfuse.Error."""
    global _on_event
    _on_event = on_event
    if lib.of_shim_init(id(Error), on_event) != OK:
        raise ImportError(f"optfuse: {message()}")
    try:
        torch.ops.optfuse.raise_error("check")
    except Error:
        return
    except RuntimeError as error:
        raise ImportError(
            "optfuse: this torch does not pass on the library's errors; rebuild with "
            "`pip install --no-build-isolation .`"
        ) from error
    raise ImportError("optfuse: the library's own check did not raise")
