# SPDX-License-Identifier: BSD-3-Clause
"""The compiled library's C functions (shim/shim.h), typed for ctypes."""

from __future__ import annotations

import ctypes
import enum

import torch

from optfuse._library.caller import find_caller
from optfuse._library.loader import load
from optfuse._library.log import configure, receive

FORWARD, BACKWARD, FINAL = 0, 1, 2
OK, LEFT = 0, -1
ALL_MODELS = -1  # of of_shim_await()
DTYPES = ("float32", "float64", "bfloat16", "float16")


class Trait(enum.IntFlag):
    """of_shim_trait of shim.h."""

    ASKS = 1
    READS_SCALE = 2
    COUNTS_PASSES = 4
    IS_SHARDED = 8
    BY_CLASS = 16


class Error(RuntimeError):
    """A refusal of optfuse, with the parameter, the reason and what to do."""

    __module__ = "optfuse"  # where users find it, and tracebacks name it
    _find_caller = staticmethod(find_caller)  # for the library, where it raises one


class PromiseCounts(ctypes.Structure):
    """of_shim_promise_counts of shim/shim.h."""

    _fields_ = [
        ("label", ctypes.c_char_p),
        ("because", ctypes.c_char_p),
        ("promised", ctypes.c_uint64),
        ("panels", ctypes.c_uint64),
        ("made", ctypes.c_uint64),
        ("whole", ctypes.c_uint64),
    ]


class Counts(ctypes.Structure):
    """of_counts of plugin/optfuse.h."""

    _fields_ = [
        ("created", ctypes.c_uint64),
        ("at_once", ctypes.c_uint64),
        ("at_use", ctypes.c_uint64),
        ("at_close", ctypes.c_uint64),
        ("in_step", ctypes.c_uint64),
        ("pending", ctypes.c_uint64),
        ("launches", ctypes.c_uint64),
        ("averages", ctypes.c_uint64),
        ("in_flight", ctypes.c_uint64),
        ("threads_seen", ctypes.c_bool),
        ("past_caches", ctypes.c_bool),
    ]


_Bool, _Int, _Size, _Text = ctypes.c_bool, ctypes.c_int, ctypes.c_size_t, ctypes.c_char_p
_Plan, _Object = ctypes.c_void_p, ctypes.py_object
_Bools, _Sizes, _Plans = map(ctypes.POINTER, (_Bool, _Size, _Plan))  # type: ignore[arg-type]
_Prototypes = dict[str, tuple[object, list[object]]]

_PROTOTYPES: _Prototypes = {
    "of_error_message": (_Text, []),
    "of_any_pending": (_Bool, []),
    "of_flush_all": (_Int, []),
    "of_shim_init": (_Int, [ctypes.c_void_p]),
    "of_shim_log_to": (None, [_Object]),
    "of_shim_rules": (_Text, []),
    "of_shim_plan_new": (_Int, [_Text, _Int, _Text, _Size, _Size, _Plans]),
    "of_shim_plan_free": (None, [_Plan]),
    "of_shim_clear": (_Int, [_Plan]),
    "of_shim_step": (_Int, [_Plan, _Sizes, _Size, _Sizes]),
    "of_shim_step_slot": (_Int, [_Plan, _Size, _Bool]),
    "of_shim_begin_nested_pass": (None, []),
    "of_shim_end_nested_pass": (None, []),
    "of_shim_flush": (_Int, [_Plan, _Bool, _Bools]),
    "of_shim_await": (_Int, [ctypes.c_int64]),
    "of_shim_is_updated": (_Bool, [_Plan, _Size]),
    "of_shim_used": (ctypes.c_uint64, [_Plan, _Size]),
    "of_shim_unconfirmed": (_Bool, [_Plan]),
    "of_shim_sharing_state": (_Size, [_Plan, _Sizes, _Size]),
    "of_shim_update_beside": (None, [_Plan]),
    "of_shim_take_mixed": (None, [_Plan]),
    "of_shim_leave_stateless": (None, [_Plan, _Bool]),
    "of_shim_promise_gradients": (None, [_Plan, _Bool]),
    "of_shim_write_gradients": (None, [_Plan]),
    "of_shim_wait_from": (ctypes.c_int64, [ctypes.c_int64]),
    "of_shim_norms_tried": (_Int, []),
    "of_shim_keep_promises": (None, []),
    "of_shim_keep_memory": (_Bool, []),
    "of_shim_count_promises": (_Bool, [_Plan, _Size, ctypes.POINTER(PromiseCounts)]),
    "of_shim_add_only": (None, [_Plan, _Int]),
    "of_shim_restart_count": (None, [_Plan]),
    "of_shim_stop_deferring": (None, [_Plan]),
    "of_shim_counts": (_Int, [_Plan, ctypes.POINTER(Counts)]),
    "of_shim_isa": (_Text, [_Plan, _Int]),
    "of_shim_is_profiled": (_Bool, []),
    "of_shim_inputs_are_profiled": (_Bool, []),
    "of_shim_begin_recompute": (ctypes.c_int, [_Plans, _Size]),
    "of_shim_end_recompute": (None, []),
    "of_shim_is_recording": (_Bool, []),
    "of_shim_recorded_counts": (None, [ctypes.POINTER(ctypes.c_int64)]),
    "of_shim_looks_in_vain": (ctypes.c_int64, [_Plan]),
    "of_shim_seal_consumed": (None, [_Bool]),
}
_WITH_GIL: _Prototypes = {
    "of_shim_ledger_open": (None, [_Plan, _Object, _Object, _Object]),
    "of_shim_ledger_rebuild": (_Int, [_Plan, _Object]),
    "of_shim_ledger_step": (_Int, [_Plan, _Object, _Bool]),
    "of_shim_ledger_step_slot": (_Int, [_Plan, _Object, _Size]),
    "of_shim_ledger_zero_grad": (_Int, [_Plan, _Object, _Bool]),
    "of_shim_ledger_tell_options": (_Int, [_Plan, _Object]),
    "of_shim_ledger_forget_state": (None, [_Plan]),
    "of_shim_ledger_note_entry": (None, [_Plan, _Size, _Bool]),
    "of_shim_recorded_step": (_Object, [_Plan, _Object, _Object, _Object]),
    "of_shim_step_ahead": (_Object, [_Plan, *(5 * [_Object])]),
    "of_shim_hide_gradients": (None, [_Plan, _Object]),
    "of_shim_step_alone": (_Object, [_Plan, _Object, _Object, _Object]),
    "of_shim_play_recorded": (_Int, [_Bool, _Bool]),
    "of_shim_watch_attributes": (_Int, [_Object, _Object, _Object, _Size]),
    "of_shim_are_of": (_Bool, [_Object, _Object, _Object]),
    "of_shim_are_once": (_Bool, [_Object, _Object]),
    "of_shim_are_in": (_Bool, [_Object, _Object, _Object]),
    "of_shim_are_gradients": (_Bool, [_Plan, _Object, _Object]),
    "of_shim_call_first": (_Int, [_Object, _Text, _Size, _Bool, _Object]),
}


def typed(library: ctypes.CDLL, prototypes: _Prototypes) -> ctypes.CDLL:
    for name, (result, arguments) in prototypes.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


lib = typed(load(), _PROTOTYPES)
lib_with_gil = typed(ctypes.PyDLL(lib._name, handle=lib._handle), _WITH_GIL)


def message() -> str:
    """The text of the last failure on this thread."""
    return str(lib.of_error_message(), errors="replace")


def check(status: int) -> None:
    if status != OK:
        raise Error(f"optfuse: {message()}")


def flush(plan: int, drain: bool = False) -> bool:
    """Launches what is pending; drain: waits for GPUs first. Whether no tensor has the mark now."""
    cleaned = ctypes.c_bool()
    check(lib.of_shim_flush(plan, drain, ctypes.byref(cleaned)))
    return cleaned.value


_SWITCHABLE = hasattr(lib, "of_guard_enabled")  # a look-up in vain takes microseconds
if _SWITCHABLE:
    typed(lib, {"of_guard_enabled": (ctypes.c_bool, [ctypes.c_char_p])})


def guard(name: str) -> bool:
    """True, unless a test-only build of the library switched this check off."""
    return not _SWITCHABLE or lib.of_guard_enabled(name.encode())


def start() -> None:
    """Once per process: registers the first-use fallback with PyTorch, and
    checks that errors raised in the library arrive as optfuse.Error."""
    if lib.of_shim_init(id(Error)) != OK:
        raise ImportError(f"optfuse: {message()}")
    configure()
    lib.of_shim_log_to(receive)
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
