# SPDX-License-Identifier: BSD-3-Clause
"""Operators that no kernel runs, such as norms, products of matrices and what is made of these: on
a tape they are calls of PyTorch's own operator, with the tensors that there are when the program
runs."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from optfuse._traced.standin import (
    CPU,
    DTYPES,
    POINT,
    Call,
    ForeignTensor,
    Form,
    Made,
    Standin,
    Tape,
    otherwise,
    tape_of,
)
from optfuse._traced.without_data import ANY_FLOAT, Blank, plain, results, settings

# Kinds of arguments; shim/traced/parts.cpp reads the same numbers.
NONE, REGISTER, INT, DOUBLE, BOOL, LIST, NUMBER, STRING, DEVICE, DEFAULT = range(10)
_ENUMS: tuple[tuple[Any, ...], ...] = (
    (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d),
    (torch.strided,),
)
_UNSEEN = frozenset({torch.Tag.nondeterministic_seeded})
_LOOKS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
# Functions of all elements of a tensor, whatever its shape, if these arguments are not there.
_OF_SOME = ("dim", "dims", "keepdim")
_WHOLE = {"sum", "mean", "linalg_vector_norm", "norm", "max", "min", "amax", "amin", "std", "var"}
_WHOLE |= {"any", "all", "_foreach_norm", "prod", "logsumexp"}


@dataclass(frozen=True)
class _Operator:
    """The facts of an operator that its calls need."""

    name: str
    overload: str
    arguments: tuple[str, ...]
    written: tuple[str, ...]
    is_mutable: bool
    gives_one: bool
    views: bool  # the first argument
    is_pointwise: bool
    why_none: str | None  # why it can't be part of a program


@functools.cache
def _operator(func: Any) -> _Operator:
    schema = func._schema
    info = schema.returns[0].alias_info if schema.returns else None
    return _Operator(
        schema.name,
        schema.overload_name,
        tuple(a.name for a in schema.arguments),
        tuple(a.name for a in schema.arguments if a.is_write),
        schema.is_mutable,
        len(schema.returns) == 1,
        info is not None and not info.is_write,
        torch.Tag.pointwise in func.tags,
        _why_no_program(func),
    )


def _why_no_program(func: Any) -> str | None:
    schema, tags = func._schema, frozenset(func.tags)
    if tags & _LOOKS or any(str(r.type) not in ("Tensor", "List[Tensor]") for r in schema.returns):
        return f"it looks at values of a tensor (operator {func})"
    if torch.Tag.inplace_view in tags:
        return f"it changes the shape of a tensor in place (operator {func})"
    if tags & _UNSEEN:
        return f"random numbers in step() (operator {func})"
    # Whole updates of optimizers read and write counters, and what unscales gradients.
    if schema.name.startswith("aten::_fused_"):
        return f"it calls PyTorch's fused update ({func}): make it without fused=True"
    if not schema.name.startswith("aten::"):
        return f"operator {func} can't be part of a program"
    if any(str(a.type) == "List[Optional[Tensor]]" for a in schema.arguments):
        return f"operator {func} can't be part of a program"
    return None


class _Writer:
    """Writes the arguments of an operator down."""

    def __init__(self, tape: Tape, called: Any) -> None:
        self._tape = tape
        self._called = called
        self.code: list[int] = []
        self.words: list[str] = []
        self.numbers: list[float] = []
        self.operands: list[Standin] = []

    def argument(self, x: Any) -> None:
        if isinstance(x, Standin):
            self._operand(x)
        elif isinstance(x, Tensor):
            self._constant(x)
        elif isinstance(x, list | tuple):
            self.code += LIST, len(x)
            for item in x:
                self.argument(item)
        elif x is None:
            self.code.append(NONE)
        elif isinstance(x, bool):
            self.code += BOOL, int(x)
        elif isinstance(x, int):
            self.code += INT, x
        elif isinstance(x, float):
            self.code.append(DOUBLE)
            self.numbers.append(x)
        else:
            self._special(x)

    def _operand(self, x: Standin) -> None:
        if x.tape is not self._tape:
            self._tape.refuse("it keeps tensors of an earlier step")
        if x.dtype == torch.bool and not x.in_bytes:
            x = _in_bytes(x)
        self.operands.append(x)
        self.code += REGISTER, x.register

    def _constant(self, x: Tensor) -> None:
        if x.ndim:
            why = "it combines a parameter with a tensor that is none of its state"
            self._tape.refuse(why, ForeignTensor)
        if x.dtype not in DTYPES or x.is_complex():
            self._tape.refuse(f"it combines a parameter with a tensor of {x.dtype}")
        self.code += NUMBER, DTYPES[x.dtype]
        self.numbers.append(float(x))

    def _special(self, x: Any) -> None:
        if isinstance(x, torch.device) and x.type != "cpu":
            self._tape.refuse(f"it makes a tensor on {x}")
        if isinstance(x, str | torch.device):
            self.code.append(STRING if isinstance(x, str) else DEVICE)
            self.words.append(str(x))
        elif isinstance(x, torch.dtype) and x in DTYPES:
            self.code += INT, DTYPES[x]
        else:
            for kinds in _ENUMS:
                if x in kinds:
                    self.code += INT, kinds.index(x)
                    return
            self._tape.refuse(f"operator {self._called} takes an object of {type(x).__name__}")


def _in_bytes(x: Standin) -> Standin:
    """A mask of numbers as PyTorch has it."""
    made: Standin = _call(torch.ops.aten.ne.Scalar, (_as_numbers(x), 0), {})
    return made


def _as_numbers(x: Standin) -> Standin:
    return Standin(x.tape, x.register, x.tape.dtype, x.form)


def _call(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return _call_on(tape_of(args, options), func, args, options)


def _note_views(tape: Tape, viewed: Standin | None, made: Iterable[Standin]) -> None:
    """Notes in whose memory the results of an operator lie, if it views an operand."""
    if viewed is None:
        return
    root = tape.roots.get(viewed.register, viewed.register)
    for x in made:
        tape.roots[x.register] = root
        tape.shared |= {root, x.register}


def _call_on(tape: Tape, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    operator = _operator(func)
    if operator.why_none is not None:
        tape.refuse(operator.why_none)
    if tape.device != CPU:
        tape.refuse(
            f"it calls operator {func}, which no kernel runs; on a GPU programs have elementwise "
            "operators only"
        )
    given = dict(zip(operator.arguments, args, strict=False)) | options
    written = [x for name in operator.written for x in _standins(given[name], tape)]
    writer = _Writer(tape, func)
    for name in operator.arguments:
        if name in given:
            writer.argument(given[name])
        else:
            writer.code.append(DEFAULT)
    made = None
    if not operator.is_mutable:
        is_whole = _is_of_whole(operator, given, writer.operands)
        made = _results(tape, func, args, options, writer.operands, is_whole)
    elif not all(map(_is_plain, writer.operands)):
        _try_without_data(tape, func, args, options)  # it may be that shapes don't fit
    for x in written:
        tape.written.add(tape.roots.get(x.register, x.register))
    _note_views(tape, args[0] if operator.views else None, _flat(made))
    tape.lines.append(
        Call(
            f"{operator.name}.{operator.overload}",
            tuple(writer.code),
            (operator.name, operator.overload, *writer.words),
            tuple(writer.numbers),
            tuple([x.register for x in writer.operands]),
            tuple([x.register for x in _flat(made)]),
        )
    )
    if operator.is_mutable:
        return args[0] if operator.gives_one and "out" not in options else options.get("out")
    return made


otherwise.append(_call)
_MAKING = {getattr(torch.ops.aten, name).default for name in ("zeros", "ones", "full")}


class Making(TorchDispatchMode):
    """Tensors that step() makes from nothing are stand-ins, too, so that it can write into them
    what comes of data."""

    def __init__(self, tape: Tape, made: Made) -> None:
        super().__init__()
        self._tape = tape
        self._also_points = made == "all"
        self._stance: Any = contextlib.nullcontext()

    def __enter__(self) -> Making:
        if "torch._dynamo" in sys.modules:  # compiling here would spoil the function for good
            self._stance = torch.compiler.set_stance("fail_on_recompile")
        self._stance.__enter__()
        made: Making = super().__enter__()
        return made

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stance.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if self._tape.lent:
            args, options = self._tape.give_back(args, options)
        if func in _MAKING and (self._also_points or args[0]):
            dtype = options.get("dtype") or torch.get_default_dtype()
            if dtype.is_floating_point:
                return _call_on(self._tape, func, args, options)
        return func(*args, **options)


_OF_NUMBER = torch.ops.aten.scalar_tensor.default


class Numbers(TorchDispatchMode):
    """Tells the tape of the tensors on a GPU that PyTorch makes of numbers, as in torch.where():
    to read them would be to wait for the GPU."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is _OF_NUMBER and made.device == self._tape.device:
            self._tape.known[id(made)] = made, float(args[0])
        return made


def _standins(x: Any, tape: Tape) -> Iterable[Standin]:
    """Those that an operator writes into."""
    for one in x if isinstance(x, list | tuple) else [x]:
        if not isinstance(one, Standin):
            why = "it writes into a tensor that is none of the parameter's state"
            tape.refuse(why, ForeignTensor)
        if one.dtype == torch.bool and not one.in_bytes:
            tape.refuse("it writes into a mask")
        yield one


def _flat(made: Any) -> list[Standin]:
    if isinstance(made, list | tuple):
        return [x for item in made for x in _flat(item)]
    return [] if made is None else [made]


def _results(
    tape: Tape,
    func: Any,
    args: tuple[Any, ...],
    options: dict[str, Any],
    operands: list[Standin],
    is_whole: bool,
) -> Any:
    """Stand-ins for the results, as the operator gives them."""
    made = _try_without_data(tape, func, args, options)
    is_fixed = is_whole or all(x.is_fixed for x in operands)
    if not operands:  # it makes a tensor, of the parameter's shape if it has looked at that
        is_fixed = not tape.looked_at_shape
    is_like_param = _operator(func).is_pointwise and all(map(_is_plain, operands))
    if not (is_fixed or is_like_param):
        tape.looked_at_shape = True
    return _like(tape, made, is_fixed)


def _try_without_data(tape: Tape, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    any_float = _operator(func).name in ANY_FLOAT
    blank = tuple([_blank(tape, x, any_float) for x in args])
    of_options = [(name, _blank(tape, x, any_float)) for name, x in _here(options)]
    try:
        return results(func, blank, tuple(of_options), settings())
    except Exception as error:
        tape.refuse(f"operator {func} can't be tried without data: {error}")


def _is_plain(x: Standin) -> bool:
    """Whether its shape is the parameter's, or none."""
    return x.form is None or x.form == POINT


def _is_of_whole(operator: _Operator, given: dict[str, Any], operands: list[Standin]) -> bool:
    """Whether it gives one number, whatever the parameter's shape."""
    return (
        operator.name.removeprefix("aten::") in _WHOLE
        and not any(given.get(name) for name in _OF_SOME)
        and all(map(_is_plain, operands))
    )


def _here(options: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, x in options.items():
        yield name, torch.device("meta") if name == "device" else x


def _blank(tape: Tape, x: Any, any_float: bool) -> Any:
    if isinstance(x, Standin):
        return tape.blank(x)
    if isinstance(x, Tensor):
        return Blank(tuple(x.shape), None, x.dtype)
    if isinstance(x, list | tuple):
        return tuple([_blank(tape, item, any_float) for item in x])
    return plain(x, any_float)


def _like(tape: Tape, made: Any, is_fixed: bool) -> Any:
    if made is None:
        return None
    if not isinstance(made, Blank):
        return type(made)(_like(tape, item, is_fixed) for item in made)
    form: Form = made.sizes, made.strides or ()
    is_params = not is_fixed and form == tape.form
    x = tape.new(made.dtype, None if is_params else form)
    if made.dtype != tape.dtype:
        tape.apart.add(x.register)
    x.in_bytes = made.dtype == torch.bool
    x.is_fixed = is_fixed
    return x
