# SPDX-License-Identifier: BSD-3-Clause
"""Puts functions in the place of PyTorch's. replace() and call_first() exchange nothing that is
not listed (listed.py), and before the first exchange changes() compares each with what the tested
releases have."""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from optfuse._library.bindings import OK, Error, lib_with_gil, message
from optfuse._library.log import warn
from optfuse._library.releases import TESTED
from optfuse._patches.listed import EVERYWHERE, Lists, Patch

_MAY_DIFFER = (
    f"Results may differ from stock PyTorch: use torch {TESTED[0]} to {TESTED[-1]}, or don't fuse"
)


def find(path: str) -> Any:
    """The object that a dotted name stands for; None: there is no such thing."""
    parts = path.split(".")
    found: Any = torch
    for n, part in enumerate(parts[1:], 2):
        if not hasattr(found, part) and isinstance(found, types.ModuleType):
            with contextlib.suppress(ImportError):
                importlib.import_module(".".join(parts[:n]))
        found = getattr(found, part, None)
    return found


@functools.cache
def _listed(lists: Lists) -> frozenset[tuple[int, str]]:
    places = (patch.target.rpartition(".") for patch in lists.patches)
    return frozenset((id(find(owner)), name) for owner, _, name in places)


def _is_of_torch(owner: Any) -> bool:
    home: str = owner.__name__ if isinstance(owner, types.ModuleType) else owner.__module__
    return home.split(".")[0] == "torch"


def replace(owner: Any, name: str, function: Any, lists: Lists | None = None) -> None:
    """Puts a function in the place of a listed one of a class or module, which it has as its
    __wrapped__ (functools.wraps)."""
    if _is_of_torch(owner) and (id(owner), name) not in _listed(lists or EVERYWHERE):
        raise Error(f"optfuse: {owner.__name__}.{name} is replaced, but _patches has no entry")
    setattr(owner, name, function)


def after(work: Callable[..., None], function: Any) -> Any:
    """The function, which calls `work` with its arguments before it does anything."""

    @functools.wraps(function)
    def work_first(*args: Any, **kwargs: Any) -> Any:
        work(*args, **kwargs)
        return function(*args, **kwargs)

    return work_first


def call_before(owner: Any, name: str, work: Callable[..., None]) -> None:
    """Puts `work` before a listed function, where this PyTorch has that one."""
    function = getattr(owner, name, None)
    if function is not None:
        replace(owner, name, after(work, function))


_called_later: list[Any] = []  # functions that call one of ours first
_IN_C = types.MethodDescriptorType | types.BuiltinFunctionType


def call_first(owner: Any, name: str, work: Callable[..., Any]) -> None:
    """Has a listed function that is written in C call `work` before it does anything, under
    whichever name it is called, and if a script has bound it long ago: with self, if it is a
    method, and with its arguments. What `work` makes of self, or of the first argument of a
    function, if not None, is used in its place."""
    function = getattr(owner, name, None)
    if function is None:
        return
    if (id(owner), name) not in _listed(EVERYWHERE):
        raise Error(f"optfuse: {owner.__name__}.{name} is changed, but _patches has no entry")
    if not isinstance(function, _IN_C):  # another library has put its own there
        call_before(owner, name, work)
        return
    is_method = isinstance(function, types.MethodDescriptorType)
    arguments = function, function.__name__.encode(), object.__basicsize__, is_method, work
    if lib_with_gil.of_shim_call_first(*arguments) != OK:
        warn(f"{message()}. {_MAY_DIFFER}", RuntimeWarning, stacklevel=2)
        return
    _called_later.append(function)


def is_replaced(function: Any) -> bool:
    """Whether another function takes its place, or comes before it."""
    return hasattr(function, "__wrapped__") or any(function == known for known in _called_later)


def _stock(function: Any) -> Any:
    """Without what was put around it."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from (code.co_name, *code.co_names, *code.co_varnames[: code.co_argcount])
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str):
            yield constant


def _mentions(path: str, name: str) -> bool:
    code = getattr(_stock(find(path)), "__code__", None)
    return code is not None and name in _names_in(code)


def _how(patch: Patch) -> str | None:
    """How it differs from what the tested releases have."""
    function = _stock(find(patch.target))
    if function is None:
        return None if patch.optional else "is not there"
    code = getattr(function, "__code__", None)
    if code is not None and code.co_varnames[: len(patch.takes)] != patch.takes:
        return f"does not take {', '.join(patch.takes)}"
    if patch.asked_by and not _mentions(patch.asked_by, patch.target.rpartition(".")[2]):
        return f"is not called by {patch.asked_by}"
    return None


def changes(lists: Lists | None = None) -> list[str]:
    """Differences of this PyTorch from the tested releases, in sentences."""
    lists = lists or EVERYWHERE
    found = [
        f"{patch.target} {how} (seen in torch {patch.since} to {TESTED[-1]}); optfuse replaces "
        f"it because: {patch.why}"
        for patch in lists.patches
        if (how := _how(patch)) is not None
    ]
    return found + [
        f"{path} does not mention {name}; optfuse replaces {what} because: {why}"
        for what, why, path, names in lists.places
        for name in names
        if not _mentions(path, name)
    ]


def warn_of_changes(lists: Lists | None = None) -> None:
    """Before anything is replaced."""
    for change in changes(lists):
        warn(
            f"in torch {torch.__version__} {change}. {_MAY_DIFFER}",
            RuntimeWarning,
            stacklevel=2,
        )
