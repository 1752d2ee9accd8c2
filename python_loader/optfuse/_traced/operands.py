# SPDX-License-Identifier: BSD-3-Clause
"""What handlers of operators share: which operators they are for, what they take, and where
their result goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from optfuse._traced.standin import Called, Handler, Standin, Untraceable, handlers

_aten = torch.ops.aten
Args = tuple[Any, ...]
Options = dict[str, Any]


def on(*names: str) -> Callable[[Handler], Handler]:
    """For operators of these names, with all of their overloads or with one: "where.self". The
    same operators in place go with them, if there are any."""

    def put(handler: Handler) -> Handler:
        for name in names:
            packet, _, overload = name.partition(".")
            for spelled in (packet, f"{packet}_"):
                found = getattr(_aten, spelled, None)
                for one in [] if found is None else found.overloads():
                    if one == overload or not overload:
                        _put(getattr(found, one), packet, handler)
        return handler

    return put


def _put(func: Any, name: str, handler: Handler) -> None:
    handlers[func] = handler, Called(name, func._schema.is_mutable, str(func))


def number(x: Any, like: Standin) -> float:
    """A number, or a tensor without dimensions that never saw data."""
    if isinstance(x, bool | int | float):
        return float(x)
    tape = like.tape
    if isinstance(x, Standin):
        tape.refuse("a tensor stands where a number is usual")
    if not isinstance(x, Tensor):
        tape.refuse(f"it combines a parameter with an object of {type(x).__name__}")
    if x.ndim:
        tape.refuse("it combines a parameter with a tensor that is none of its state")
    if not tape.sizes and x.dtype != like.dtype:
        tape.refuse(f"it combines {x.dtype} with a parameter that has no dimensions either")
    return float(x)


def real(first: Any, *others: Any) -> None:
    """That they are stand-ins on one tape, of one floating dtype."""
    if not isinstance(first, Standin):
        _refuse_first(first, others)
    dtype = first.dtype
    if not dtype.is_floating_point:
        first.tape.refuse(f"it computes with {dtype}")
    for x in others:
        if not isinstance(x, Standin):
            number(x, first)
            first.tape.refuse("a number stands where a tensor is usual")
        if x.tape is not first.tape:
            first.tape.refuse("it keeps tensors of an earlier step")
        if x.dtype != dtype:
            first.tape.refuse(f"it computes with {dtype} and {x.dtype} together")


def _refuse_first(first: Any, others: tuple[Any, ...]) -> NoReturn:
    for x in others:
        if isinstance(x, Standin):
            number(first, x)
            x.tape.refuse("a number stands where a tensor is usual")
    raise Untraceable("an operator without a stand-in")


def mask(*masks: Any, like: Standin) -> None:
    """That they are booleans on its tape."""
    for x in masks:
        if not isinstance(x, Standin) or x.dtype != torch.bool:
            like.tape.refuse("it takes as a mask what comes from no comparison of its tensors")
        if x.tape is not like.tape:
            like.tape.refuse("it keeps tensors of an earlier step")


def result(called: Called, args: Args, options: Options, like: Standin) -> Standin:
    """Where a result goes that is as this one: in place, to out=, or into a new register."""
    if not called.in_place:
        return like.tape.new(like.dtype)
    target = options.get("out", args[0])
    if not isinstance(target, Standin):
        like.tape.refuse("it writes into a tensor that is none of the parameter's state")
    if target.tape is not like.tape:
        like.tape.refuse("it keeps tensors of an earlier step")
    if target.dtype != like.dtype:
        like.tape.refuse(f"it writes {like.dtype} into {target.dtype}")
    return target
