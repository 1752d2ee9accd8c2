# SPDX-License-Identifier: BSD-3-Clause
"""ATen's arithmetic on a tape."""

from __future__ import annotations

from typing import Any

import torch

from optfuse._traced.operands import Args, Options, is_operand, mask, number, on, real, result
from optfuse._traced.standin import CPU, Called, Handler, Later, NotElementwise, Standin, times

_POWERS = {
    2.0: "square",
    3.0: "cube",
    0.5: "sqrt",
    -0.5: "rsqrt",
    -1.0: "reciprocal",
    -2.0: "invsquare",
    1.0: "copy",
}


def _unary(name: str) -> Handler:
    def handler(called: Called, args: Args, options: Options) -> Any:
        x = args[0]
        real(x)
        return x.tape.write(name, result(called, args, options, x), x)

    return handler


for _name in ("neg", "abs", "sign", "square", "sqrt", "rsqrt", "reciprocal"):
    on(_name)(_unary(_name))
on("sgn")(_unary("sign"))


@on("pow")
def _pow(called: Called, args: Args, options: Options) -> Any:
    """A tensor to the power of a number; that of a tensor, and on the CPU most in float16, PyTorch
    takes by a library's pow(). With AVX-512 pow() has longer vectors than rsqrt(), whose elements
    behind the last vector are rounded once more in 16 bits."""
    x, exponent = args[:2]
    real(x)
    name = None if isinstance(exponent, torch.Tensor) else _POWERS.get(float(exponent))
    is_narrow_root = name == "rsqrt" and x.dtype.itemsize == 2
    is_of_library = x.dtype == torch.float16 and name not in ("square", "copy")
    if name is None or (x.tape.device == CPU and (is_narrow_root or is_of_library)):
        raise NotElementwise(f"{called.full_name} of {x.dtype}")
    return _unary(name)(called, args, options)


def _binary(name: str, with_number: str | None, number_first: str | None) -> Handler:
    def handler(called: Called, args: Args, options: Options) -> Any:
        x, y = args[:2]
        if options.get("rounding_mode") is not None:
            raise NotElementwise("rounding_mode=")
        if is_operand(x) and is_operand(y):
            like = _real_of(x, y)
            return like.tape.write(name, result(called, args, options, like), x, y)
        like, other = (x, y) if is_operand(x) else (y, x)
        real(like)
        s = number(other, like)
        operator = with_number if like is x else number_first
        if operator is None:
            raise NotElementwise(f"{called.full_name} with a number")
        return like.tape.write(operator, result(called, args, options, like), like, s=s)

    return handler


def _real_of(x: Standin, y: Standin) -> Standin:
    """One whose dtype the result has: beside a real one a boolean is 0 or 1."""
    if (x.dtype == torch.bool) != (y.dtype == torch.bool) and x.tape is y.tape:
        like, other = (y, x) if x.dtype == torch.bool else (x, y)
        real(like)
        mask(other, like=like)
        return like
    real(x, y)
    return x


on("mul")(_binary("mul", "mul_number", "mul_number"))
on("div")(_binary("div", "div_number", "number_div"))
on("maximum")(_binary("maximum", None, None))
on("minimum")(_binary("minimum", None, None))


def _add(called: Called, args: Args, options: Options, sign: float = 1.0) -> Any:
    """x + sign alpha y"""
    x, y = args[:2]
    like = x if is_operand(x) else y
    real(like)
    given = args[2] if len(args) > 2 else options.get("alpha")
    alpha = sign if given is None else times(sign, number(given, like))
    if is_operand(x) and is_operand(y):
        real(x, y)
        return x.tape.write("add", result(called, args, options, x), x, y, s=alpha)
    tape = like.tape
    if like is y:
        s = number(x, y)
        return tape.write("number_add", result(called, args, options, y), y, s=s, t=alpha)
    if isinstance(alpha, Later) or abs(alpha) != 1.0:
        raise NotElementwise("a number times alpha")
    s = times(float(alpha), number(y, x))
    return tape.write("add_number", result(called, args, options, x), x, s=s)


@on("sub")
def _subtract(called: Called, args: Args, options: Options) -> Any:
    return _add(called, args, options, -1.0)


@on("rsub")
def _subtract_from(called: Called, args: Args, options: Options) -> Any:
    return _add(called, (args[1], args[0], *args[2:]), options, -1.0)


on("add")(_add)


def _of_three(name: str) -> Handler:
    """x + value (y operator z)"""

    def handler(called: Called, args: Args, options: Options) -> Any:
        x, y, z = args[:3]
        real(x, y, z)
        s = number(args[3] if len(args) > 3 else options.get("value", 1), x)
        return x.tape.write(name, result(called, args, options, x), x, y, z, s=s)

    return handler


on("addcmul")(_of_three("addcmul"))
on("addcdiv")(_of_three("addcdiv"))


@on("lerp")
def _lerp(called: Called, args: Args, options: Options) -> Any:
    x, y, weight = args[:3]
    real(x, y)
    s = number(weight, x)
    return x.tape.write("lerp", result(called, args, options, x), x, y, s=s)


@on("clamp", "clamp_min", "clamp_max")
def _clamp(called: Called, args: Args, options: Options) -> Any:
    x, *bounds = args
    only_most = called.name == "clamp_max"
    least = options.get("min", bounds[0] if bounds and not only_most else None)
    most = options.get("max", bounds[-1] if only_most or len(bounds) > 1 else None)
    real(x)
    to = result(called, args, options, x)
    if is_operand(least) and is_operand(most):
        real(x, least, most)
        return x.tape.write("clamp", to, x, least, most)
    if least is not None:
        x = _limit(to, x, least, "maximum", "clamp_min")
    if most is not None:
        _limit(to, x, most, "minimum", "clamp_max")
    return to


def _limit(to: Standin, x: Standin, bound: Any, by_tensor: str, by_number: str) -> Standin:
    if is_operand(bound):
        real(x, bound)
        return to.tape.write(by_tensor, to, x, bound)
    if isinstance(bound, Standin):
        raise NotElementwise("a bound that may be NaN, which as a number is none")
    return to.tape.write(by_number, to, x, s=number(bound, x))
