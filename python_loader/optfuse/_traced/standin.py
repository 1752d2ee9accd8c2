# SPDX-License-Identifier: BSD-3-Clause
"""Tensors without data, of which an optimizer's step() computes nothing: each operator on them
writes a line on a tape."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

# operator, to, a, b, c: registers of the tape; s, t: numbers
Line = tuple[str, int, int, int, int, float, float]
# What an ATen operator becomes: it gets the operator, its arguments and its options.
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class Untraceable(Exception):
    """Why a step() is more than a line of elementwise operators."""


class Tape:
    """What one run of step() did, and all that it made."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.n = 0  # registers
        self.alive: list[weakref.ref[Standin]] = []
        self.looked_at_shape = False
        self.why: Untraceable | None = None  # the first reason, also if step() caught it

    def new(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Standin:
        """With a register of its own."""
        self.n += 1
        return Standin(self, self.n - 1, shape, dtype)

    def write(
        self, operator: str, to: Standin, *of: Standin, s: float = 0.0, t: float = 0.0
    ) -> Standin:
        a, b, c = (*(x.register for x in of), 0, 0, 0)[:3]
        self.lines.append((operator, to.register, a, b, c, s, t))
        return to

    def refuse(self, why: str) -> NoReturn:
        error = Untraceable(why)
        self.why = self.why or error
        raise error


class Standin(Tensor):
    """In the place of a parameter, its gradient, its state or what is computed of these."""

    tape: Tape
    register: int

    @staticmethod
    def __new__(
        cls, tape: Tape, register: int, shape: torch.Size | tuple[int, ...], dtype: torch.dtype
    ) -> Standin:
        made: Standin = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device="cpu")  # type: ignore[attr-defined]
        made.tape = tape
        made.register = register
        tape.alive.append(weakref.ref(made))
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        handler = handlers.get(func)
        if handler is None:
            handler = by_namespace(func)
            if handler is None:
                tape_of(args, kwargs).refuse(f"operator {func} can't be part of a program")
        return handler(func, args, kwargs or {})

    def __setitem__(self, mask: Any, value: Any) -> None:
        if not isinstance(mask, Standin):
            self.tape.refuse("it writes to a part of a tensor")
        torch.ops.aten.masked_fill_(self, mask, value)


handlers: dict[Any, Handler] = {}
_families: list[tuple[str, Handler]] = []


def family(prefix: str) -> Callable[[Handler], Handler]:
    """A handler for all operators whose name begins so."""

    def put(handler: Handler) -> Handler:
        _families.append((prefix, handler))
        return handler

    return put


def by_namespace(func: Any) -> Handler | None:
    name = func._schema.name
    return next((handler for prefix, handler in _families if name.startswith(prefix)), None)


def tape_of(*values: Any) -> Tape:
    """The tape of the first stand-in among them, in lists, too."""
    todo = list(values)
    while todo:
        value = todo.pop(0)
        if isinstance(value, Standin):
            return value.tape
        if isinstance(value, list | tuple):
            todo = [*value, *todo]
        elif isinstance(value, dict):
            todo = [*value.values(), *todo]
    raise Untraceable("an operator without a stand-in")


def _noting(name: str) -> Any:
    """Something of the shape, whose looking at is noted."""
    real: Any = getattr(Tensor, name)

    def look(self: Standin, *args: Any, **kwargs: Any) -> Any:
        self.tape.looked_at_shape = True
        return real(self, *args, **kwargs)

    def look_at(self: Standin) -> Any:
        self.tape.looked_at_shape = True
        return real.__get__(self)

    return look if callable(real) else property(look_at)


def _refusing(name: str) -> Any:
    def refuse(self: Standin, *args: Any, **kwargs: Any) -> Any:
        self.tape.refuse(f"it looks at values or memory of a tensor ({name})")

    return refuse if callable(getattr(Tensor, name, refuse)) else property(refuse)


for _name in ("shape", "size", "numel", "dim", "ndim", "stride", "nelement", "ndimension"):
    setattr(Standin, _name, _noting(_name))
for _name in ("__len__", "nbytes", "is_contiguous"):
    setattr(Standin, _name, _noting(_name))
for _name in (
    *("data_ptr", "numpy", "tolist", "item", "storage", "untyped_storage", "storage_offset"),
    *("__array__", "__dlpack__", "__deepcopy__", "__reduce_ex__", "__bool__", "__float__"),
    *("__int__", "__index__", "__iter__", "__getitem__", "__contains__", "_version"),
    *("register_hook", "backward", "is_set_to", "share_memory_", "const_data_ptr"),
):
    setattr(Standin, _name, _refusing(_name))
