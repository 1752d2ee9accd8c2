# SPDX-License-Identifier: BSD-3-Clause
"""The code of an optimizer's class: its step(), and the names in what that reaches."""

from __future__ import annotations

import contextlib
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer

_HOOKED = Optimizer.profile_hook_step(lambda _: None).__code__
# Modules in whose functions nobody looks for names, and names by which code may make others.
_PURE = {"torch", "math", "numpy", "typing", "functools", "itertools", "operator", "collections"}
_PURE |= {"builtins", "contextlib", "abc", "enum", "dataclasses", "copy", "warnings"}
_ANY = {"__dict__", "vars", "dir", "getattr", "items", "keys", "values"}


def step_of(stock: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """The class's own step() without the profiler's and the hooks' wrapper, but with a script's, to
    which functools.wraps() gives the attributes of that one."""
    step: Any = stock.step
    is_hooked = getattr(step, "__code__", None) is _HOOKED
    return step.__wrapped__ if is_hooked else step  # type: ignore[no-any-return]


@contextlib.contextmanager
def without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Those of step() run around that of the optimizer, and not around one that it calls."""
    own = optimizer.__dict__
    names = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    hooks = {name: own[name] for name in names if own.get(name)}
    own.update((name, OrderedDict()) for name in hooks)
    try:
        yield
    finally:
        own.update(hooks)


@functools.cache
def names_read(stock: type[Optimizer]) -> frozenset[str] | None:
    """Names and strings in the code that step() reaches, arguments included, as options may become
    those. None: any, as it is not all in Python or looks at all names."""
    classes = [cls for cls in stock.__mro__ if cls not in (Optimizer, object)]
    torchs = {name for cls in classes if _is_pure(cls.__module__) for name in vars(cls)}
    classes = [cls for cls in classes if not _is_pure(cls.__module__)]
    todo: list[Any] = [step_of(stock)]
    if not isinstance(todo[0], types.FunctionType):
        return None
    # PyTorch's code may call what takes the place of its own.
    names = {name for cls in classes for name in vars(cls) if name in torchs and name[:2] != "__"}
    read: set[str] = set()
    seen: dict[int, Any] = {}
    while todo:
        value = todo.pop()
        if id(value) not in seen:
            seen[id(value)] = value
            if isinstance(value, type):
                classes.append(value)
            todo += _inside(value, read)
        if not todo:
            methods = (item for cls in classes for item in vars(cls).items())
            named = (v for k, v in methods if k in names or k in read)
            todo += (value for value in named if id(value) not in seen)
    return None if read & _ANY else frozenset(read)


def _inside(value: Any, names: set[str]) -> Iterator[Any]:
    if isinstance(value, type) and not issubclass(value, Optimizer):
        yield from (v for k, v in vars(value).items() if k.startswith("__") and callable(v))
    elif isinstance(value, property):
        yield from (value.fget, value.fset)
    elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
        yield value.__func__
    elif isinstance(value, types.FunctionType):
        yield from _named_by(value, names)
    elif callable(value):
        yield getattr(value, "__wrapped__", None)


def _is_pure(module: Any) -> bool:
    return str(module or "").partition(".")[0] in _PURE


def _named_by(function: types.FunctionType, names: set[str]) -> Iterator[Any]:
    """Objects that a function names in its module, in others, and in closures. Adds names."""
    yield function.__dict__.get("__wrapped__")
    yield from (_content_of(cell) for cell in function.__closure__ or ())
    if _is_pure(function.__globals__.get("__name__")):  # that of a wrapper, not of the wrapped
        return
    todo = [function.__code__]
    found: set[str] = set()
    while todo:
        code = todo.pop()
        found.update(code.co_names, (x for x in code.co_consts if isinstance(x, str)))
        names.update(found, code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        todo += [x for x in code.co_consts if isinstance(x, types.CodeType)]
    for name in found:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType) and not _is_pure(value.__name__):
            yield from (value.__dict__.get(other) for other in found)
        elif not _is_pure(getattr(value, "__module__", None)):
            yield value


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
