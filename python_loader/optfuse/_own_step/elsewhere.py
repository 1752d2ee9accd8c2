# SPDX-License-Identifier: BSD-3-Clause
"""Whether a step() may leave something in what a run of it has no copy of: globals, modules,
classes, variables of closures, values of arguments that are left out. By what the code can do that
it reaches; where that is not known, it may."""

from __future__ import annotations

import dis
import enum
import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from optfuse._own_step.twin import CONSTANT, step_of

# Modules whose functions leave nothing anywhere, but for generators of random numbers and clocks,
# which have names of their own.
_PURE = {"torch", "math", "cmath", "numbers", "typing", "typing_extensions", "functools"}
_PURE |= {"itertools", "operator", "collections", "copy", "abc", "enum", "dataclasses", "numpy"}
_PURE |= {"builtins", "contextlib", "fractions", "__future__"}
_DRAWING = {"bernoulli", "bernoulli_", "normal", "normal_", "uniform", "uniform_", "exponential_"}
_DRAWING |= {"cauchy_", "geometric_", "log_normal_", "multinomial", "dropout", "choice", "choices"}
_DRAWING |= {"shuffle", "sample", "gauss", "betavariate", "permutation", "integers", "getrandbits"}
_DRAWING |= {"standard_normal", "seed", "manual_seed", "initial_seed", "urandom", "uuid1", "uuid4"}
_DRAWING |= {"time", "perf_counter", "monotonic", "process_time", "thread_time", "time_ns"}
_DRAWING |= {"perf_counter_ns", "monotonic_ns", "process_time_ns", "thread_time_ns"}
_DRAWING |= {"clock_gettime", "now", "utcnow", "today"}
_ON_TENSORS = {"rand_like", "randn_like", "randint_like"}  # operators, which a replay sees
# Names by which code comes to the globals, variables and modules of others, or to a file.
_WRITERS = {"globals", "__globals__", "__builtins__", "f_globals", "__closure__", "cell_contents"}
_WRITERS |= {"__defaults__", "__kwdefaults__", "exec", "eval", "__import__", "import_module"}
_WRITERS |= {"print", "open", "input", "breakpoint"}
_OF_CLASS = {"type", "__class__", "__mro__", "__bases__", "__func__", "__subclasses__"}
_SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__", "__dict__", "vars"}
# Where code has these, names don't tell which functions of a class it calls.
_ANY = {"getattr", "__getattribute__", "attrgetter", "methodcaller", "__dict__", "vars", "dir"}
_NEVER = {"__init__", "__setstate__", "__getstate__", "__reduce__", "__reduce_ex__", "__new__"}
_NEVER |= {"__init_subclass__", "__class_getitem__", "__del__"}  # not by step(), unless named
_SWAPS = ("SWAP", "ROT_TWO", "ROT_THREE")  # before an attribute that `+=` changes
_COPIES = ("COPY", "DUP_TOP")  # of the object that has it
_READS = ("LOAD_ATTR", "LOAD_METHOD")
_CACHED = type(functools.lru_cache(len))
_METHODS = (staticmethod, classmethod, types.MethodType)
_MISSING = object()
_UNCHANGING = (
    *CONSTANT,
    *(staticmethod, classmethod, property, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(types.GenericAlias, types.UnionType),
)


@functools.cache
def draws(stock: type[Optimizer]) -> bool:
    """Whether code that step() reaches names functions that draw random numbers, or clocks."""
    names = set(filter(str.isidentifier, _reach_of(stock).names)) - _ON_TENSORS
    random = any(name.startswith("rand") or "random" in name for name in names)
    return random or not _DRAWING.isdisjoint(names)


@functools.cache
def writes_elsewhere(stock: type[Optimizer]) -> bool:
    """Whether code that step() reaches may write into what a run has no copy of."""
    return _reach_of(stock).may_write()


@functools.cache
def names_reached(stock: type[Optimizer]) -> frozenset[str] | None:
    """The names in code that step() reaches. None: with them it may come to any attribute."""
    names = _reach_of(stock).names
    return frozenset(names) if names.isdisjoint(_ANY) else None


def functions_reached(stock: type[Optimizer]) -> list[types.FunctionType]:
    """Functions that step() reaches, without PyTorch's and those of pure modules."""
    return _reach_of(stock).functions


def may_be_written(value: Any) -> bool:
    """Whether a run could leave something in it."""
    if type(value) in (tuple, frozenset):
        return any(map(may_be_written, value))
    if isinstance(value, types.FunctionType):
        return bool(value.__closure__ or value.__dict__) or _may_write(value)
    if isinstance(value, type):
        return not _is_pure(value.__module__)
    if isinstance(value, types.BuiltinFunctionType):  # a method of a list, perhaps
        return not _is_pure_builtin(value)
    return not isinstance(value, _UNCHANGING) and type(value).__module__ != "typing"


@functools.lru_cache(256)
def _may_write(function: types.FunctionType) -> bool:
    return _Reach([], [function]).may_write()


def _is_filled(value: Any) -> bool:
    """The same of what code names: functions are looked at themselves."""
    return not isinstance(value, (types.FunctionType, _CACHED)) and may_be_written(value)


def _is_pure(module: Any) -> bool:
    return str(module or "").partition(".")[0] in _PURE


def _is_pure_builtin(function: types.BuiltinFunctionType) -> bool:
    owner = function.__self__
    if isinstance(owner, types.ModuleType):
        return _is_pure(owner.__name__.lstrip("_"))
    return isinstance(owner, (type, type(None)))


@functools.cache
def _reach_of(stock: type[Optimizer]) -> _Reach:
    classes = [cls for cls in stock.__mro__ if cls not in (Optimizer, object)]
    step = step_of(stock)
    if isinstance(step, types.FunctionType):
        return _Reach(classes, [step, *_overrides(classes)])
    return _Reach(classes, [value for cls in classes for value in vars(cls).values()])


def _overrides(classes: list[type]) -> list[Any]:
    """Methods in the place of those of PyTorch's optimizers, which may call them."""
    torchs = {name for cls in classes if _is_pure(cls.__module__) for name in vars(cls)}
    own = [(n, v) for cls in classes if not _is_pure(cls.__module__) for n, v in vars(cls).items()]
    return [value for name, value in own if name in torchs and not name.startswith("__")]


class _Reach:
    """The code that some functions reach: methods by their names, and what is named in their
    modules, in other modules and in classes there."""

    def __init__(self, classes: list[type], start: Iterable[Any]) -> None:
        self.names: set[str] = set()
        self.functions: list[types.FunctionType] = []
        self._classes = dict.fromkeys(classes, False)  # whether step() may make objects of it
        self._writes = self._stores = self._has_class = False
        self._todo: deque[tuple[Any, bool]] = deque((one, True) for one in start)
        self._seen: dict[int, Any] = {}
        while self._todo or self._take_methods():
            self._take(*self._todo.popleft())

    def may_write(self) -> bool:
        """_stores: into attributes of variables, which may be classes where _has_class."""
        has_class = self._has_class or not self.names.isdisjoint(_OF_CLASS)
        stores = self._stores or not self.names.isdisjoint(_SETTERS)
        return (
            self._writes
            or (stores and has_class)
            or not self.names.isdisjoint(_WRITERS)
            or any(_is_filled(v) for _, name, v in self._named() if name in self.names)
        )

    def _named(self) -> Iterator[tuple[bool, str, Any]]:
        """The contents of the classes: whether step() may make objects of it, a name, a value."""
        for cls, makes in self._classes.items():
            for base in cls.__mro__ if makes else (cls,):
                if not _is_pure(base.__module__):
                    yield from ((makes, name, value) for name, value in vars(base).items())

    def _take_methods(self) -> bool:
        """Whether there are more of them in the classes."""
        is_any = not self.names.isdisjoint(_ANY)
        for makes, name, value in list(self._named()):
            is_implicit = name.startswith("__") and (makes or name not in _NEVER)
            if (name in self.names or is_implicit or (is_any and name not in _NEVER)) and (
                id(value) not in self._seen
            ):
                self._todo.append((value, True))
        return bool(self._todo)

    def _take(self, value: Any, is_method: bool) -> None:
        """A function, or what has functions in it."""
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, property):
            self._todo.extend((f, is_method) for f in (value.fget, value.fset, value.fdel))
        elif isinstance(value, _METHODS):
            self._has_class |= isinstance(value, classmethod)
            self._todo.append((value.__func__, False))
        elif isinstance(value, (types.FunctionType, _CACHED)):
            self._todo.append((value.__dict__.get("__wrapped__"), is_method))
            # A result that is kept is the same object at the next call.
            self._writes |= isinstance(value, _CACHED) and not _is_pure(value.__module__)
        if isinstance(value, types.FunctionType):
            self._take_function(value, is_method)

    def _take_function(self, function: types.FunctionType, is_method: bool) -> None:
        if _is_pure(function.__globals__.get("__name__")):  # that of a wrapper, not of the wrapped
            for cell in function.__closure__ or ():
                self._todo.append((content_of(cell), is_method))
            return
        left_out = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        own = [v for name, v in function.__dict__.items() if not name.startswith("_")]
        self._writes |= bool(own) or any(map(_is_filled, left_out))
        self.names |= names_of([function])
        self.functions.append(function)
        for code in codes_of([function]):
            self._read(code, function, is_method and code is function.__code__)

    def _read(self, code: types.CodeType, function: types.FunctionType, is_method: bool) -> None:
        known = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        steps = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
        for i, one in enumerate(steps):
            kind, name = one.opname, one.argval
            if kind in ("STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_BUILD_CLASS"):
                self._writes = True
            elif kind in ("STORE_DEREF", "DELETE_DEREF"):
                self._writes |= name in known
            elif kind == "LOAD_GLOBAL":
                self._take_named(_global(function, name), steps, i)
            elif kind in ("LOAD_DEREF", "LOAD_CLOSURE") and name in known:
                if name != "__class__" or steps[i - 1].argval != "super":
                    self._take_named(content_of(known[name]), steps, i)
            elif kind == "IMPORT_NAME":
                self._writes |= bool(steps[i - 2].argval) or not _is_pure(name)
            elif kind in ("STORE_ATTR", "DELETE_ATTR"):
                owner = _variable(_owner(steps, i))
                is_self = is_method and code.co_argcount > 0 and owner == code.co_varnames[0]
                self._writes |= owner is None
                self._stores |= not is_self

    def _take_named(self, value: Any, steps: list[dis.Instruction], at: int) -> None:
        """The value that the instruction at this place gives, or an attribute of this module."""
        while isinstance(value, types.ModuleType):
            at += 1
            pure, is_read = _is_pure(value.__name__), steps[at].opname in _READS
            self._has_class |= not is_read or steps[at].argval == "__dict__"
            self._writes |= not is_read and not pure
            if not is_read or pure:
                return
            value = value.__dict__.get(steps[at].argval, _MISSING)
        if isinstance(value, type):
            self._take_class(value)
        elif isinstance(value, (types.FunctionType, _CACHED)):
            self._todo.append((value, False))
        else:
            self._writes |= _is_filled(value)

    def _take_class(self, cls: type) -> None:
        if _is_pure(cls.__module__):
            return
        self._classes[cls] = True
        self._has_class |= not issubclass(cls, (BaseException, enum.Enum))
        self._writes |= not cls.__flags__ & 1 << 9  # it is not made by Python


def _global(function: types.FunctionType, name: str) -> Any:
    """None: it fails, or is a builtin, whose name tells whether it has effects."""
    return function.__globals__.get(name)


def _variable(owner: dis.Instruction | None) -> str | None:
    """The variable of this function that the instruction gives."""
    if owner is None or "LOAD_FAST" not in owner.opname:
        return None
    name = owner.argval
    return name[-1] if isinstance(name, tuple) else name  # two at once


def _owner(steps: list[dis.Instruction], i: int) -> dis.Instruction | None:
    """The instruction that gives the object whose attribute is stored at i."""
    if steps[i - 1].opname not in _SWAPS:
        return steps[i - 1]
    for k in range(i - 1, 0, -1):
        is_read = steps[k].opname == "LOAD_ATTR" and steps[k].argval == steps[i].argval
        if is_read and steps[k - 1].opname in _COPIES:
            return steps[k - 2]
    return None


def content_of(cell: types.CellType) -> Any:
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
