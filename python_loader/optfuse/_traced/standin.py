# SPDX-License-Identifier: BSD-3-Clause
"""Tensors without data, of which an optimizer's step() computes nothing: each operator on them
writes a line on a tape."""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from optfuse._traced.without_data import Blank

Form = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides
POINT: Form = (), ()
MOST_OUTCOMES = 4  # of branches on values
CPU = torch.device("cpu")
# Tensors that a step() makes from nothing and that are stand-ins: none; those with
# dimensions; all, with those that may be counters. A trial goes through them in this order.
Made = Literal["none", "shaped", "all"]
# c10::ScalarType, by its order.
DTYPES = {
    dtype: i
    for i, dtype in enumerate(
        (
            *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
            *(torch.float16, torch.float32, torch.float64),
            *(torch.complex32, torch.complex64, torch.complex128, torch.bool),
        )
    )
} | {torch.bfloat16: 15}


class Untraceable(Exception):
    """Why a step() can't be a program."""


class ForeignTensor(Untraceable):
    """A tensor takes part that is no stand-in."""


class NotElementwise(Exception):
    """Why an operator is none that a kernel runs."""


@dataclass(frozen=True)
class Later:
    """A number that is known when the program runs: sign times the value of a register of one
    element, for all elements of an instruction. No float: what can't wait for it fails."""

    register: int
    sign: int = 1


Number = float | Later
# operator, to, a, b, c: registers of the tape; s, t: numbers
Line = tuple[str, int, int, int, int, Number, Number]


def times(factor: float, x: Number) -> Number:
    if not isinstance(x, Later):
        return factor * x
    if factor not in (1.0, -1.0):
        raise NotElementwise("a number times another one")
    return Later(x.register, int(factor) * x.sign)


@dataclass(frozen=True)
class Call:
    """An operator that PyTorch runs, between lines."""

    operator: str  # as "aten::linalg_vector_norm.default"
    code: tuple[int, ...]  # its arguments, as shim/traced/parts.cpp reads them
    words: tuple[str, ...]  # and what it reads of these
    numbers: tuple[float, ...]
    reads: tuple[int, ...]  # registers, the written ones among them
    makes: tuple[int, ...]


@dataclass(frozen=True)
class Branch:
    """A branch of step() on a value: what follows it is for this outcome."""

    register: int
    outcome: bool
    depth: int  # branches before it


class Tape:
    """The record of one run of step(), and all that it made. Stand-ins have the parameter's shape
    but for those that came out of calls."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        dtype: torch.dtype,
        strides: tuple[int, ...] | None = None,
        device: torch.device = CPU,
    ) -> None:
        """strides: if not contiguous."""
        self.device = device
        self.sizes = sizes
        self.dtype = dtype
        self.strides = strides
        self.lines: list[Line | Call | Branch] = []
        self.roots: dict[int, int] = {}  # of views: the register whose memory it is
        self.shared: set[int] = set()  # registers whose memory another one has, too
        self.written: set[int] = set()  # registers that calls write
        # Registers of another number of elements or dtype than the parameter's: not for lines.
        self.apart: set[int] = set()
        self.n = 0  # registers
        self.alive: list[weakref.ref[Standin]] = []
        # Tensors without dimensions on a GPU that PyTorch makes of numbers, by their ids.
        self.known: dict[int, tuple[Tensor, float]] = {}
        self.looked_at_shape = False
        self.looked_at_requires_grad = False
        # The outcomes of the first branches on values; of later ones it is True. None: no branches
        # are followed. Behind each of them registers begin at its number in `begins`, if there is
        # one.
        self.decisions: tuple[bool, ...] | None = None
        self.begins: tuple[int, ...] = ()
        self.taken: list[bool] = []
        # Numbers that stand for values which PyTorch asks for to hand them to an operator, as
        # alpha= is; until that operator comes, which must be the next one.
        self.lent: dict[float, Standin] = {}
        # The first reason, also if step() caught it; no exception, which would keep the frames
        # that it came through, and with them the optimizer.
        self.why: tuple[type[Untraceable], str] | None = None

    def new(self, dtype: torch.dtype, form: Form | None = None) -> Standin:
        """With a register of its own. form: if it is not the parameter's."""
        self.n += 1
        return Standin(self, self.n - 1, dtype, form)

    def write(
        self,
        operator: str,
        to: Standin,
        a: Standin | None = None,
        b: Standin | None = None,
        c: Standin | None = None,
        s: Number = 0.0,
        t: Number = 0.0,
    ) -> Standin:
        x = 0 if a is None else a.register
        y = 0 if b is None else b.register
        z = 0 if c is None else c.register
        self.lines.append((operator, to.register, x, y, z, s, t))
        return to

    def refuse(self, why: str, kind: type[Untraceable] = Untraceable) -> NoReturn:
        self.why = self.why or (kind, why)
        raise kind(why)

    def branch(self, x: Standin) -> bool:
        """The outcome of a branch on a value, in this run."""
        if self.decisions is None or x.form is None or math.prod(x.form[0]) != 1:
            self.refuse("it branches on a tensor's value (__bool__)")
        at = len(self.taken)
        if at == MOST_OUTCOMES:  # a loop that ends by a value, perhaps
            self.refuse(f"it branches on more than {MOST_OUTCOMES} values")
        outcome = at >= len(self.decisions) or self.decisions[at]
        self.lines.append(Branch(x.register, outcome, at))
        self.taken.append(outcome)
        if at < len(self.begins):
            self.n = max(self.n, self.begins[at])
        return outcome

    def lend(self, x: Standin) -> float:
        """A number that stands for a value, for the operator that comes next."""
        if x.form != POINT or not x.dtype.is_floating_point or self.device != CPU:
            self.refuse("it reads numbers out of a tensor (_local_scalar_dense)")
        value = _LENT + (1 + len(self.lent)) * 2.0**-50
        self.lent[value] = x
        return value

    def give_back(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The arguments and options of an operator, with the tensors that numbers stand for."""
        lent, self.lent = self.lent, {}

        def real(value: Any) -> Any:
            return lent.pop(value) if type(value) is float and value in lent else value

        args = tuple([real(value) for value in args])
        options = {name: real(value) for name, value in options.items()}
        if lent:
            self.refuse("it reads numbers out of a tensor (_local_scalar_dense)")
        return args, options

    def answer(self, question: Any, x: Standin, *args: Any) -> Any:
        """The answer of x to one of the operators in QUESTIONS. Operators ask for the number of
        dimensions, too, where step() does not."""
        if question is not _DIM and not x.is_fixed:
            self.looked_at_shape = True
        if question is _SIZES:
            return list(self.sizes if x.form is None else x.form[0])
        return question(self.blank(x).tensor(), *args)

    def blank(self, x: Standin) -> Blank:
        """A tensor like it, without data."""
        sizes, strides = (self.sizes, self.strides) if x.form is None else x.form
        return Blank(sizes, strides, x.dtype)

    @functools.cached_property
    def form(self) -> Form:
        """The parameter's."""
        if self.strides is not None:
            return self.sizes, tuple(self.strides)
        return self.sizes, torch.empty(self.sizes, device="meta").stride()


_LENT = 0.09371  # no number that a step() has
# Attributes in which PyTorch keeps the answers.
_OF_PYTORCH = "_sym_sizes_", "_sym_strides_", "_sizes_", "_strides_"
_aten = torch.ops.aten
_VALUE = _aten._local_scalar_dense.default
_DIM, _SIZES = _aten.dim.default, _aten.sym_size.default
_QUESTIONS = {
    *(_DIM, _SIZES, _aten.size.default, _aten.numel.default),
    *(_aten.sym_numel.default, _aten.stride.default, _aten.sym_stride.default),
    *(_aten.is_contiguous.default, _aten.is_contiguous.memory_format),
    *(_aten.is_strides_like_format.default, _aten.is_non_overlapping_and_dense.default),
}


@dataclass(frozen=True)
class Called:
    """An operator of ATen, for its handler."""

    name: str  # without overload and the underscore of those that are in place
    in_place: bool  # also: into out=
    full_name: str


# Records an operator: it gets the operator, its arguments and its options.
Handler = Callable[[Called, tuple[Any, ...], dict[str, Any]], Any]
handlers: dict[Any, tuple[Handler, Called]] = {}
# The same by the operators' ids, which are found in less time: their __hash__() is Python.
_by_id: dict[int, tuple[Handler, Called]] = {}


def put_handler(func: Any, handler: Handler, called: Called) -> None:
    handlers[func] = _by_id[id(func)] = handler, called


# Records an operator that has no handler, or is not elementwise: calls.py.
otherwise: list[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = []


def _noting(name: str) -> Any:
    """The number of dimensions, when step() asks for it itself."""
    real: Any = getattr(Tensor, name)

    def look(self: Standin) -> Any:
        self.tape.looked_at_shape = True
        return real(self) if callable(real) else real.__get__(self)

    return look if callable(real) else property(look)


_NUMBERS = {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__index__"}
_NUMBERS |= {"__complex__", "__contains__", "__repr__", "__format__"}


def _refusing(name: str) -> Any:
    why = "it looks at a tensor's memory or at what PyTorch keeps of it"
    if name in _NUMBERS:
        why = "it reads numbers out of a tensor"

    def refuse(self: Standin, *args: Any, **kwargs: Any) -> Any:
        self.tape.refuse(f"{why} ({name})")

    return refuse if callable(getattr(Tensor, name, refuse)) else property(refuse)


dict_of = Tensor.__dict__["__dict__"].__get__  # a stand-in's own, which it refuses to show
_of_parameters = type(torch.nn.Parameter).__instancecheck__.__code__


def _class_of(x: Standin) -> type[Standin]:
    """Python asks for it in isinstance() where the type says no."""
    if sys._getframe(1).f_code is _of_parameters:
        x.tape.refuse("it asks whether a tensor is of a subclass of Parameter")
    return Standin


def _set_data(x: Standin, value: Any) -> NoReturn:
    x.tape.refuse("it puts another tensor into .data, where it could write into the one there")


def _grad_of(x: Standin) -> Standin | None:
    return x.of_grad


def _set_grad(x: Standin, value: Any) -> None:
    """PyTorch would ask __torch_dispatch__() for both shapes."""
    x.of_grad = value


_requires_grad: Any = torch._C.TensorBase.requires_grad


def requires_grad_of(x: Standin) -> bool:
    return bool(_requires_grad.__get__(x))


def _look_at_requires_grad(x: Standin) -> bool:
    """A parameter that has a gradient need not require one."""
    x.tape.looked_at_requires_grad = True
    return requires_grad_of(x)


# Answers of a stand-in where PyTorch would look at attributes that it does not have.
_ANSWERS = {
    "grad": property(_grad_of, _set_grad, lambda x: _set_grad(x, None)),
    **{name: _noting(name) for name in ("dim", "ndim", "ndimension")},
    **{
        name: _refusing(name)
        for name in (
            *("data_ptr", "numpy", "tolist", "item", "storage", "untyped_storage"),
            *("storage_offset", "_typed_storage", "__array__", "__dlpack__"),
            *("__reduce_ex__", "__float__", "__int__", "__index__", "__complex__"),
            *("__contains__", "__repr__", "__format__", "_version"),
            *("__dict__", "_backward_hooks", "_post_accumulate_grad_hooks"),
            *("register_hook", "backward", "is_set_to", "share_memory_", "const_data_ptr"),
        )
    },
    "__bool__": lambda x: x.tape.branch(x),
    "__class__": property(_class_of),
    "requires_grad": property(_look_at_requires_grad, lambda x, to: _requires_grad.__set__(x, to)),
    "data": property(Tensor.detach, _set_data),
}
_Answers: Any = type("_Answers", (), _ANSWERS)
_make_wrapper = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
_throw_on_data_ptr = torch._C._set_throw_on_mutable_data_ptr


class Standin(_Answers, Tensor):  # type: ignore[misc]
    """In the place of a parameter, its gradient, its state or what is computed of these."""

    tape: Tape
    register: int
    form: Form | None = None  # None: the parameter's
    is_real: bool  # of the parameter's dtype
    in_bytes = False  # a mask that a call has made; that of a line is of numbers
    is_fixed = False  # its shape is the same whatever the parameter's
    of_grad: Standin | None = None  # the gradient

    @staticmethod
    def __new__(
        cls, tape: Tape, register: int, dtype: torch.dtype, form: Form | None = None
    ) -> Standin:
        # By this policy PyTorch asks __torch_dispatch__() for shape and strides.
        made: Standin = _make_wrapper(
            cls,
            tape.sizes if form is None else form[0],
            strides=tape.strides if form is None else form[1],
            dtype=dtype,
            device=tape.device,
            dispatch_sizes_strides_policy="sizes",
        )
        # Else the untyped data_ptr() in C++ gives a null pointer.
        _throw_on_data_ptr(made)
        made.tape = tape
        made.register = register
        made.is_real = dtype == tape.dtype
        if form is not None:
            made.form = form
            tape.apart.add(register)
        tape.alive.append(weakref.ref(made))
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = _by_id.get(id(func))
        if found is not None:
            tape, options = tape_of(args, kwargs), kwargs or {}
            if tape.lent:
                args, options = tape.give_back(args, options)
            lines = tape.lines
            n = len(lines)
            try:
                return found[0](found[1], args, options)
            except NotElementwise:
                del lines[n:]
                kwargs = options
        elif func in _QUESTIONS:
            return args[0].tape.answer(func, *args)
        elif func is _VALUE:
            return args[0].tape.lend(args[0])
        else:
            tape = tape_of(args, kwargs)
            if tape.lent:
                args, kwargs = tape.give_back(args, kwargs or {})
        return otherwise[0](func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if requires_grad_of(self):
            self.tape.refuse("it copies a parameter")
        return memo.setdefault(id(self), self.clone())

    def __setitem__(self, which: Any, value: Any) -> None:
        if isinstance(which, Standin):
            torch.ops.aten.masked_fill_(self, which, value)
        else:
            super().__setitem__(which, value)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith(_OF_PYTORCH):
            raise AttributeError(name)
        if name == "__tensor_flatten__":
            self.tape.refuse("it compiles what it computes (torch.compile)")
        self.tape.refuse(
            f"it looks for the attribute {name!r} of a tensor, which may be there for some "
            "parameters only"
        )


_OURS = {"tape", "register", "form", "is_real", "in_bytes", "is_fixed", "of_grad"}


def own_attributes(x: Standin) -> set[str]:
    """Names of those that step() gave it."""
    names = dict_of(x).keys()
    if names <= _OURS:
        return set()
    return {k for k in names - _OURS if not k.startswith(_OF_PYTORCH)}


def tape_of(*values: Any) -> Tape:
    """The tape of the first stand-in among them, in lists, too."""
    first = values[0]
    while type(first) in (list, tuple) and first:
        first = first[0]
    if type(first) is Standin:  # as nearly always
        return first.tape
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
