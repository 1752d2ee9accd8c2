# SPDX-License-Identifier: BSD-3-Clause
"""Options of groups and attributes of an optimizer, which its class's own step() may use, and
whether they are still as they were. A name that the class's code does not have belongs to the
script, which may keep notes there."""

from __future__ import annotations

import contextlib
import functools
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optfuse._bits import difference
from optfuse._library.bindings import guard
from optfuse._options import LINK

Group = dict[str, Any]
_HOOKED = Optimizer.profile_hook_step(lambda _: None).__code__
_HOOKS = [
    f"_optimizer_{what}_{when}_hooks"
    for what in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
]
# Attributes of every optimizer, and those that PyTorch writes in step() for itself: in wrappers,
# and a check that its fused implementations need to make once.
_NOT_OWN = frozenset(
    (
        *("param_groups", "state", "step", LINK, "_step_supports_amp_scaling", *_HOOKS),
        *("_warned_capturable_if_run_uncaptured", "_opt_called", "_step_count"),
        "_need_device_dtype_check_for_fused",
    )
)
_NOT_OPTIONS = ("params", "param_names")
_DEFAULTS = "defaults"  # of groups that are still to come
# Among attributes: what the state holds under other keys than parameters, such as a counter.
_SHARED = "state of no parameter"
_FEW = 1024  # numbers in a tensor
_LISTS = (list, tuple, deque)
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


def own_attributes(values: dict[str, Any]) -> dict[str, Any]:
    """Those that belong to the class."""
    return {k: v for k, v in values.items() if k not in _NOT_OWN}


def own_options(group: Group) -> Group:
    return {k: v for k, v in group.items() if k not in _NOT_OPTIONS}


class Noted:
    """The options and attributes of an optimizer at one time."""

    def __init__(
        self,
        optimizer: Optimizer,
        stock: type[Optimizer],
        is_written: Callable[[Tensor], bool] = lambda _: False,
    ) -> None:
        """is_written: whether updates make or change a tensor, which is only told by its identity
        then."""
        self._is_written = is_written
        self._read = names_read(stock)
        # PyTorch's code, in which nobody looks for names, reads those with a default.
        self._defaults = frozenset(optimizer.__dict__.get(_DEFAULTS, ()))
        self._options = [self._options_of(group) for group in optimizer.param_groups]
        self._attributes = self._attributes_of(optimizer)

    def changed_option(self, number: int, group: Group) -> str | None:
        """The first in which a group differs from what group `number` was."""
        return next(_differing(self._options[number], self._options_of(group)), None)

    def changed_attribute(self, optimizer: Optimizer) -> str | None:
        return next(_differing(self._attributes, self._attributes_of(optimizer)), None)

    def _options_of(self, group: Group) -> dict[str, Any]:
        read, defaults = self._read, self._defaults
        return {
            name: noted(value, self._is_written)
            for name, value in own_options(group).items()
            if read is None or name in read or name in defaults
        }

    def _attributes_of(self, optimizer: Optimizer) -> dict[str, Any]:
        read = self._read
        own = {
            name: value
            for name, value in own_attributes(optimizer.__dict__).items()
            if name != _DEFAULTS and (read is None or name in read)
        }
        all_ = (own | shared_state(optimizer)).items()
        return {k: noted(_unbound(v, optimizer), self._is_written) for k, v in all_}


class Settings:
    """All options and attributes around one call of step()."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._attributes = _with_notes(own_attributes(optimizer.__dict__))
        self._options = [_with_notes(own_options(group)) for group in optimizer.param_groups]

    def changed(self, optimizer: Optimizer) -> str | None:
        """The first that is no longer what it was."""
        groups = optimizer.param_groups
        if len(groups) != len(self._options):
            return "the number of groups"
        name = _changed_name(*self._attributes, own_attributes(optimizer.__dict__))
        if name is not None:
            return f"the attribute {name!r}"
        for i, (known, group) in enumerate(zip(self._options, groups, strict=True)):
            if (name := _changed_name(*known, own_options(group))) is not None:
                return f"the option {name!r} of group {i}"
        return None


def _with_notes(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """And those that may change in place."""
    may = {k: v for k, v in values.items() if isinstance(v, (Tensor, dict, list, deque))}
    return values, {k: noted(v) for k, v in may.items() if k != _DEFAULTS}


def _changed_name(values: dict[str, Any], notes: dict[str, Any], now: dict[str, Any]) -> str | None:
    for name in {**values, **now}:
        if (name in values) != (name in now):
            return name
        if name in notes:
            if difference("", notes[name], noted(now[name])) is not None:
                return name
        elif values[name] is not now[name] and difference("", values[name], now[name]) is not None:
            return name
    return None


def _differing(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    """The names under which two dicts differ."""
    for name in {**a, **b}:
        missing = (name in a) != (name in b)
        if missing or difference("", a.get(name), b.get(name)) is not None:
            yield name


def _unbound(value: Any, optimizer: Optimizer) -> Any:
    """A method of the optimizer is another object at each look."""
    is_method = isinstance(value, types.MethodType) and value.__self__ is optimizer
    return value.__func__ if is_method else value


def shared_state(optimizer: Optimizer) -> dict[str, Any]:
    found = {k: v for k, v in optimizer.__dict__["state"].items() if not isinstance(k, Tensor)}
    return {_SHARED: found} if found else {}


def noted(value: Any, is_written: Callable[[Tensor], bool] = lambda _: False) -> Any:
    """Numbers and the like can't change, and other objects are told by their identity."""
    if isinstance(value, Tensor):
        return id(value) if is_written(value) else _noted_tensor(value)
    if type(value) in _LISTS:
        return type(value)(noted(item, is_written) for item in value)
    if isinstance(value, dict):
        return {key: noted(item, is_written) for key, item in value.items()}
    return value


def _noted_tensor(tensor: Tensor) -> Any:
    """A write through .data or NumPy leaves a tensor's version as it is. But values on a GPU would
    have to be waited for, and many numbers copied."""
    if tensor.device.type == "cpu" and tensor.numel() <= _FEW and guard("late_values"):
        return tensor.detach().clone()
    return id(tensor), tensor._version


# ---- the class's code


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
