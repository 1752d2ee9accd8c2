# SPDX-License-Identifier: BSD-3-Clause
"""Shared by handlers of operators: which operators they are for, what they take, and where
their result goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from optfuse._traced.standin import (
    POINT,
    Called,
    ForeignTensor,
    Handler,
    Later,
    NotElementwise,
    Number,
    Standin,
    put_handler,
)

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
    put_handler(func, handler, Called(name, func._schema.is_mutable, str(func)))


def is_operand(x: Any) -> bool:
    """Whether it has the parameter's shape. What else a step() makes without dimensions is a
    number, and everything else an operand of calls."""
    return isinstance(x, Standin) and x.form != POINT


def number(x: Any, like: Standin) -> Number:
    """A number, or a tensor without dimensions; of one that never saw data the value."""
    if isinstance(x, bool | int | float):
        return float(x)
    tape = like.tape
    if isinstance(x, Standin):
        mixed = not tape.sizes and x.dtype != like.dtype
        if x.form != POINT or x.tape is not tape or mixed:
            raise NotElementwise("a tensor stands where a number is usual")
        return Later(x.register)
    if not isinstance(x, Tensor):
        tape.refuse(f"it combines a parameter with an object of {type(x).__name__}")
    if x.ndim:
        why = "it combines a parameter with a tensor that is none of its state"
        tape.refuse(why, ForeignTensor)
    if x.device.type != "cpu":
        tape.refuse(f"it takes a number from {x.device}, where reading it waits for the device")
    if not tape.sizes and x.dtype != like.dtype:
        raise NotElementwise(f"it combines {x.dtype} with {like.dtype}, both without dimensions")
    return float(x)


def number_or_known(x: Any, like: Standin) -> Number:
    """The same for an operator to which it makes no difference whether a number is a tensor on a
    GPU, as PyTorch may have made of it."""
    _, value = like.tape.known.get(id(x), (None, None))
    return number(x, like) if value is None else value


def in_room(x: Standin) -> None:
    """That kernels can have it in their room for a block of elements."""
    if x.form is not None or x.in_bytes or x.register in x.tape.shared:
        raise NotElementwise("a tensor of another shape, dtype or memory")


def real(first: Any, *others: Any) -> None:
    """That they are stand-ins on one tape, of the parameter's dtype."""
    for x in (first, *others):
        if not isinstance(x, Standin) or not x.is_real:
            raise NotElementwise("a number or another dtype")
        if x.tape is not first.tape:
            first.tape.refuse("it keeps tensors of an earlier step")
        in_room(x)


def mask(*masks: Any, like: Standin) -> None:
    """That they are booleans on its tape."""
    for x in masks:
        if not isinstance(x, Standin) or x.dtype != torch.bool:
            raise NotElementwise("a mask that comes from no comparison of its tensors")
        if x.tape is not like.tape:
            like.tape.refuse("it keeps tensors of an earlier step")
        in_room(x)


def result(called: Called, args: Args, options: Options, like: Standin) -> Standin:
    """Where a result goes that is as this one: in place, to out=, or into a new register."""
    if not called.in_place:
        return like.tape.new(like.dtype)
    target = options.get("out", args[0])
    if not isinstance(target, Standin):
        why = "it writes into a tensor that is none of the parameter's state"
        like.tape.refuse(why, ForeignTensor)
    if target.tape is not like.tape:
        like.tape.refuse("it keeps tensors of an earlier step")
    both_real = target.is_real and like.is_real  # asking for a dtype takes longer
    if not both_real and target.dtype != like.dtype:
        raise NotElementwise(f"it writes {like.dtype} into {target.dtype}")
    in_room(target)
    return target
