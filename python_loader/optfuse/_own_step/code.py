# SPDX-License-Identifier: BSD-3-Clause
"""The code that a class's step() reaches, and the names in it."""

from __future__ import annotations

import dis
import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch.optim import Optimizer

from optfuse._own_step.twin import step_of

# Modules in whose functions nobody looks for names.
_PURE = {"torch", "math", "cmath", "numbers", "typing", "typing_extensions", "functools"}
_PURE |= {"itertools", "operator", "collections", "copy", "abc", "enum", "dataclasses", "numpy"}
_PURE |= {"builtins", "contextlib", "fractions", "__future__"}
# Where code has these, names don't tell which functions of a class it calls.
_ANY = {"getattr", "__getattribute__", "attrgetter", "methodcaller", "__dict__", "vars", "dir"}
_NEVER = {"__init__", "__setstate__", "__getstate__", "__reduce__", "__reduce_ex__", "__new__"}
_NEVER |= {"__init_subclass__", "__class_getitem__", "__del__"}  # not by step(), unless named
_READS = ("LOAD_ATTR", "LOAD_METHOD")
_CACHED = type(functools.lru_cache(len))
_METHODS = (staticmethod, classmethod, types.MethodType)


@functools.cache
def functions_reached(stock: type[Optimizer]) -> list[types.FunctionType]:
    """Functions that step() reaches, without PyTorch's and those of pure modules."""
    classes = [cls for cls in stock.__mro__ if cls not in (Optimizer, object)]
    step = step_of(stock)
    if isinstance(step, types.FunctionType):
        return _Reach(classes, [step, *_overrides(classes)]).functions
    return _Reach(classes, [value for cls in classes for value in vars(cls).values()]).functions


def _is_pure(module: Any) -> bool:
    return str(module or "").partition(".")[0] in _PURE


def _overrides(classes: list[type]) -> list[Any]:
    """Methods in the place of those of PyTorch's optimizers, which may call them."""
    torchs = {name for cls in classes if _is_pure(cls.__module__) for name in vars(cls)}
    own = [(n, v) for cls in classes if not _is_pure(cls.__module__) for n, v in vars(cls).items()]
    return [value for name, value in own if name in torchs and not name.startswith("__")]


class _Reach:
    """The code that some functions reach: methods by their names, and what is named in their
    modules, in other modules and in classes there."""

    def __init__(self, classes: list[type], start: Iterable[Any]) -> None:
        self.functions: list[types.FunctionType] = []
        self._names: set[str] = set()
        self._classes = dict.fromkeys(classes, False)  # whether step() may make objects of it
        self._todo: deque[Any] = deque(start)
        self._seen: dict[int, Any] = {}
        while self._todo or self._take_methods():
            self._take(self._todo.popleft())

    def _named(self) -> Iterator[tuple[bool, str, Any]]:
        """The contents of the classes: whether step() may make objects of it, a name, a value."""
        for cls, makes in self._classes.items():
            for base in cls.__mro__ if makes else (cls,):
                if not _is_pure(base.__module__):
                    yield from ((makes, name, value) for name, value in vars(base).items())

    def _take_methods(self) -> bool:
        """Whether there are more of them in the classes."""
        is_any = not self._names.isdisjoint(_ANY)
        for makes, name, value in list(self._named()):
            is_implicit = name.startswith("__") and (makes or name not in _NEVER)
            if (name in self._names or is_implicit or (is_any and name not in _NEVER)) and (
                id(value) not in self._seen
            ):
                self._todo.append(value)
        return bool(self._todo)

    def _take(self, value: Any) -> None:
        """A function, or what has functions in it."""
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, property):
            self._todo.extend((value.fget, value.fset, value.fdel))
        elif isinstance(value, _METHODS):
            self._todo.append(value.__func__)
        elif isinstance(value, (types.FunctionType, _CACHED)):
            self._todo.append(value.__dict__.get("__wrapped__"))
        if isinstance(value, types.FunctionType):
            self._take_function(value)

    def _take_function(self, function: types.FunctionType) -> None:
        if _is_pure(function.__globals__.get("__name__")):  # that of a wrapper, not of the wrapped
            self._todo.extend(map(_content_of, function.__closure__ or ()))
            return
        self._names |= names_of([function])
        self.functions.append(function)
        for code in codes_of([function]):
            self._read(code, function)

    def _read(self, code: types.CodeType, function: types.FunctionType) -> None:
        known = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        steps = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
        for i, one in enumerate(steps):
            kind, name = one.opname, one.argval
            if kind == "LOAD_GLOBAL":
                self._take_named(function.__globals__.get(name), steps, i)
            elif kind in ("LOAD_DEREF", "LOAD_CLOSURE") and name in known:
                is_for_super = name == "__class__" and steps[i - 1].argval == "super"
                self._take_named(None if is_for_super else _content_of(known[name]), steps, i)

    def _take_named(self, value: Any, steps: list[dis.Instruction], at: int) -> None:
        """The value that the instruction at this place gives, or an attribute of this module."""
        while isinstance(value, types.ModuleType):
            at += 1
            if steps[at].opname not in _READS or _is_pure(value.__name__):
                return
            value = value.__dict__.get(steps[at].argval)
        if isinstance(value, type) and not _is_pure(value.__module__):
            self._classes[value] = True
        elif isinstance(value, (types.FunctionType, _CACHED)):
            self._todo.append(value)


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def names_of(functions: Iterable[types.FunctionType]) -> set[str]:
    """Names and strings in their code."""
    found: set[str] = set()
    for code in codes_of(functions):
        found.update(code.co_names, (x for x in code.co_consts if isinstance(x, str)))
    return found


def codes_of(functions: Iterable[types.FunctionType]) -> Iterator[types.CodeType]:
    """Their code, and that of the functions in it."""
    todo = [f.__code__ for f in functions]
    while todo:
        code = todo.pop()
        yield code
        todo += [x for x in code.co_consts if isinstance(x, types.CodeType)]
