# SPDX-License-Identifier: BSD-3-Clause
"""ATen's comparisons on a tape, and choices by their results."""

from __future__ import annotations

from typing import Any

import torch

from optfuse._traced.operands import (
    Args,
    Options,
    is_operand,
    mask,
    number,
    number_or_known,
    on,
    real,
    result,
)
from optfuse._traced.standin import Called, Handler, NotElementwise, Standin


def _comparison(name: str) -> Handler:
    def handler(called: Called, args: Args, options: Options) -> Any:
        x, y = args[:2]
        if called.in_place:
            raise NotElementwise(f"{called.full_name} in place")
        if is_operand(y):
            real(x, y)
            return x.tape.write(name, x.tape.new(torch.bool), x, y)
        real(x)
        return x.tape.write(f"{name}_number", x.tape.new(torch.bool), x, s=number(y, x))

    return handler


for _name in ("gt", "ge", "lt", "le", "eq", "ne"):
    on(_name)(_comparison(_name))


@on("isnan.default")
def _isnan(called: Called, args: Args, options: Options) -> Any:
    (x,) = args
    real(x)
    return x.tape.write("ne", x.tape.new(torch.bool), x, x)


def _logical(name: str) -> Handler:
    def handler(called: Called, args: Args, options: Options) -> Any:
        first = next((x for x in args if isinstance(x, Standin)), None)
        if first is None:
            raise NotElementwise("no operand")
        mask(*args, like=first)
        return first.tape.write(name, result(called, args, options, first), *args)

    return handler


for _name in ("bitwise_and", "logical_and", "__and__"):
    on(_name)(_logical("logical_and"))
for _name in ("bitwise_or", "logical_or", "__or__"):
    on(_name)(_logical("logical_or"))
for _name in ("bitwise_not", "logical_not"):
    on(_name)(_logical("logical_not"))


def _choose(to: Standin, which: Any, x: Any, y: Any) -> Standin:
    """Where the mask is set x, elsewhere y."""
    mask(which, like=to)
    if is_operand(x) and is_operand(y):
        real(x, y)
        return to.tape.write("where", to, which, x, y)
    if is_operand(y):
        return to.tape.write("where_number_first", to, which, y, s=number_or_known(x, y))
    return to.tape.write("where_number_second", to, which, x, s=number_or_known(y, x))


@on("where.self")
def _where(called: Called, args: Args, options: Options) -> Any:
    which, x, y = args
    like = x if is_operand(x) else y
    real(like)
    return _choose(like.tape.new(like.dtype), which, x, y)


@on("masked_fill")
def _masked_fill(called: Called, args: Args, options: Options) -> Any:
    x, which, value = args
    real(x)
    return _choose(result(called, args, options, x), which, number(value, x), x)
