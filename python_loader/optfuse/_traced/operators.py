# SPDX-License-Identifier: BSD-3-Clause
"""What ATen's operators are on a tape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optfuse._traced.standin import Handler, Standin, family, handlers, tape_of

_aten = torch.ops.aten
_POWERS = {
    2.0: "square",
    3.0: "cube",
    0.5: "sqrt",
    -0.5: "rsqrt",
    -1.0: "reciprocal",
    -2.0: "invsquare",
    1.0: "copy",
}


def _on(*operators: Any) -> Any:
    def put(handler: Handler) -> Handler:
        handlers.update(dict.fromkeys(operators, handler))
        return handler

    return put


def _all(name: str) -> list[Any]:
    """The overloads of an operator, in place and out of place."""
    packets = [getattr(_aten, n) for n in (name, f"{name}_") if hasattr(_aten, n)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


def _is_in_place(func: Any) -> bool:
    return bool(func._schema.is_mutable)


def _number(x: Any, like: Standin) -> float:
    """A number, or a tensor without dimensions that never saw data."""
    is_plain = isinstance(x, bool | int | float)
    is_zero_dim = isinstance(x, Tensor) and not isinstance(x, Standin) and x.dim() == 0
    if not is_plain and not is_zero_dim:
        what = "a tensor" if isinstance(x, Tensor) else f"an object of {type(x).__name__}"
        like.tape.refuse(f"it combines a parameter with {what} that is none of its state")
    return float(x)


def _same(first: Standin, *others: Any) -> None:
    """Operands of one shape, on one tape."""
    shape = Tensor.size(first)
    for other in others:
        if not isinstance(other, Standin):
            _number(other, first)
            first.tape.refuse("a number stands where a tensor is usual")
        if other.tape is not first.tape or Tensor.size(other) != shape:
            first.tape.refuse("it combines tensors of different shapes")


def _real(*tensors: Standin) -> None:
    """Of the parameter's dtype."""
    for x in tensors:
        if not x.dtype.is_floating_point or x.dtype != tensors[0].dtype:
            x.tape.refuse(f"it computes with dtype {x.dtype} and {tensors[0].dtype} together")


def _result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: Standin) -> Standin:
    """Where a result of this shape goes: in place, to out=, or into a new register."""
    target = kwargs.get("out")
    if target is None and not _is_in_place(func):
        return like.tape.new(Tensor.size(like), like.dtype)
    target = args[0] if target is None else target
    if not isinstance(target, Standin):
        like.tape.refuse("it writes into a tensor that is none of the parameter's state")
    _same(like, target)
    if target.dtype != like.dtype:
        like.tape.refuse(f"it writes {like.dtype} into {target.dtype}")
    return target


def _binary(name: str, number: str | None, number_first: str | None) -> Handler:
    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, y = args[:2]
        tape = tape_of(x, y)
        if kwargs.get("rounding_mode") is not None:
            tape.refuse("it divides with rounding_mode=")
        if isinstance(x, Standin) and isinstance(y, Standin):
            if x.dtype == torch.bool or y.dtype == torch.bool:
                _mask(x, y)
            else:
                _real(x, y)
            _same(x, y)
            like = y if x.dtype == torch.bool else x
            return tape.write(name, _result(func, args, kwargs, like), x, y)
        like, other = (x, y) if isinstance(x, Standin) else (y, x)
        operator = number if like is x else number_first
        s = _number(other, like)
        _real(like)
        if operator is None:
            tape.refuse(f"operator {func} with a number")
        return tape.write(operator, _result(func, args, kwargs, like), like, s=s)

    return handler


def _mask(x: Standin, y: Standin) -> None:
    """Booleans are 0 and 1 in a product."""
    if x.dtype == y.dtype:
        x.tape.refuse("it computes with booleans")


_on(*_all("mul"), *_all("multiply"))(_binary("mul", "mul_number", "mul_number"))
_on(*_all("div"), *_all("true_divide"))(_binary("div", "div_number", "number_div"))
_on(*_all("maximum"))(_binary("maximum", None, None))
_on(*_all("minimum"))(_binary("minimum", None, None))


def _add(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sign: float = 1.0) -> Any:
    """add and sub: x + sign alpha y."""
    x, y = args[:2]
    tape = tape_of(x, y)
    like = x if isinstance(x, Standin) else y
    alpha = sign * _number(args[2] if len(args) > 2 else kwargs.get("alpha", 1), like)
    if not isinstance(x, Standin):
        _real(y)
        s = _number(x, y)
        return tape.write("number_add", _result(func, args, kwargs, y), y, s=s, t=alpha)
    if isinstance(y, Standin):
        _real(x, y)
        _same(x, y)
        return tape.write("add", _result(func, args, kwargs, x), x, y, s=alpha)
    _real(x)
    if abs(alpha) != 1.0:
        tape.refuse("it adds a number times alpha")
    return tape.write("add_number", _result(func, args, kwargs, x), x, s=alpha * _number(y, x))


def _subtract(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _add(func, args, kwargs, -1.0)


def _subtract_from(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _add(func, (args[1], args[0], *args[2:]), kwargs, -1.0)


_on(*_all("add"))(_add)
_on(*_all("sub"))(_subtract)
_on(*_all("rsub"))(_subtract_from)


def _of_three(name: str) -> Handler:
    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, y, z = args[:3]
        tape = tape_of(x, y, z)
        first = x if isinstance(x, Standin) else y if isinstance(y, Standin) else z
        _same(first, x, y, z)
        _real(x, y, z)
        s = _number(args[3] if len(args) > 3 else kwargs.get("value", 1), x)
        return tape.write(name, _result(func, args, kwargs, x), x, y, z, s=s)

    return handler


_on(*_all("addcmul"))(_of_three("addcmul"))
_on(*_all("addcdiv"))(_of_three("addcdiv"))


@_on(*_all("lerp"))
def _lerp(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, y, weight = args[:3]
    tape = tape_of(x, y, weight)
    first = x if isinstance(x, Standin) else y
    if not isinstance(first, Standin):
        tape.refuse("its lerp has a tensor as weight")
    _same(first, x, y)
    _real(x, y)
    return tape.write("lerp", _result(func, args, kwargs, x), x, y, s=_number(weight, x))


def _unary(name: str) -> Handler:
    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        tape = tape_of(args)
        if not isinstance(x, Standin):
            tape.refuse("it writes into a tensor that is none of the parameter's state")
        _real(x)
        return tape.write(name, _result(func, args, kwargs, x), x)

    return handler


for _aten_name, _own in (
    *(("neg", "neg"), ("abs", "abs"), ("sign", "sign"), ("sgn", "sign"), ("square", "square")),
    *(("sqrt", "sqrt"), ("rsqrt", "rsqrt"), ("reciprocal", "reciprocal")),
):
    _on(*_all(_aten_name))(_unary(_own))


@_on(*_all("pow"))
def _pow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, exponent = args[:2]
    tape = tape_of(args)
    if not isinstance(x, Standin):
        tape.refuse("it takes a number to the power of a tensor")
    name = _POWERS.get(_number(exponent, x))
    by_powf = x.dtype == torch.float16 and name not in ("square", "copy")
    if name is None or by_powf:  # PyTorch takes all others in float16 by a library's pow
        tape.refuse(f"it takes a tensor of {x.dtype} to the power of {exponent}")
    return _unary(name)(func, args, kwargs)


@_on(*_all("clamp"), *_all("clamp_min"), *_all("clamp_max"))
def _clamp(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, *bounds = args
    tape = tape_of(args, kwargs)
    if not isinstance(x, Standin):
        tape.refuse("it limits a tensor that is none of the parameter's state")
    _real(x)
    only_most = "clamp_max" in func._schema.name
    least = kwargs.get("min", bounds[0] if bounds and not only_most else None)
    most = kwargs.get("max", bounds[-1] if only_most or len(bounds) > 1 else None)
    to = _result(func, args, kwargs, x)
    if isinstance(least, Standin) and isinstance(most, Standin):
        _same(x, least, most)
        _real(x, least, most)
        return tape.write("clamp", to, x, least, most)
    for bound, by_number, by_tensor in (
        (least, "clamp_min", "maximum"),
        (most, "clamp_max", "minimum"),
    ):
        if isinstance(bound, Standin):
            _same(x, bound)
            _real(x, bound)
            x = tape.write(by_tensor, to, x, bound)
        elif bound is not None:
            x = tape.write(by_number, to, x, s=_number(bound, x))
    return to


def _comparison(name: str) -> Handler:
    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, y = args[:2]
        tape = tape_of(x, y)
        if not isinstance(x, Standin) or _is_in_place(func):
            tape.refuse(f"operator {func} can't be part of a program")
        _real(x)
        to = tape.new(Tensor.size(x), torch.bool)
        if not isinstance(y, Standin):
            return tape.write(f"{name}_number", to, x, s=_number(y, x))
        _same(x, y)
        _real(x, y)
        return tape.write(name, to, x, y)

    return handler


for _name in ("gt", "ge", "lt", "le", "eq", "ne"):
    _on(*_all(_name))(_comparison(_name))


@_on(_aten.isnan.default)
def _isnan(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    _real(x)
    return x.tape.write("ne", x.tape.new(Tensor.size(x), torch.bool), x, x)


def _logical(name: str) -> Handler:
    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tape = tape_of(args)
        for x in args:
            if not isinstance(x, Standin) or x.dtype != torch.bool:
                tape.refuse(f"operator {func} of what is no boolean tensor")
        _same(*args)
        return tape.write(name, _result(func, args, kwargs, args[0]), *args)

    return handler


for _aten_name, _own in (
    *(("bitwise_and", "logical_and"), ("logical_and", "logical_and"), ("__and__", "logical_and")),
    *(("bitwise_or", "logical_or"), ("logical_or", "logical_or"), ("__or__", "logical_or")),
    *(("bitwise_not", "logical_not"), ("logical_not", "logical_not")),
):
    _on(*_all(_aten_name))(_logical(_own))


def _choose(tape: Any, to: Standin, mask: Any, x: Any, y: Any) -> Standin:
    """Where the mask is set x, elsewhere y."""
    if not isinstance(mask, Standin) or mask.dtype != torch.bool:
        tape.refuse("it chooses by a mask that does not come from the parameter")
    _same(mask, to)
    if isinstance(x, Standin) and isinstance(y, Standin):
        _same(x, y)
        _real(x, y)
        return tape.write("where", to, mask, x, y)
    if isinstance(y, Standin):
        return tape.write("where_number_first", to, mask, y, s=_number(x, y))
    return tape.write("where_number_second", to, mask, x, s=_number(y, x))


@_on(_aten.where.self)
def _where(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mask, x, y = args
    tape = tape_of(args)
    like = x if isinstance(x, Standin) else y
    if not isinstance(like, Standin):
        tape.refuse("it chooses between two numbers")
    _real(like)
    return _choose(tape, tape.new(Tensor.size(like), like.dtype), mask, x, y)


@_on(*_all("masked_fill"))
def _masked_fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, mask, value = args
    tape = tape_of(args)
    if not isinstance(x, Standin):
        tape.refuse("it writes into a tensor that is none of the parameter's state")
    _real(x)
    return _choose(tape, _result(func, args, kwargs, x), mask, value, x)


@_on(_aten.clone.default, _aten._to_copy.default)
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    dtype = kwargs.get("dtype") or x.dtype
    if str(kwargs.get("device") or "cpu") != "cpu":
        x.tape.refuse("it moves tensors to another device")
    if x.dtype != torch.bool and dtype != x.dtype:
        x.tape.refuse(f"it converts {x.dtype} to {dtype}")
    return x.tape.write("copy", x.tape.new(Tensor.size(x), dtype), x)


@_on(_aten.copy_.default)
def _copy_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    to, x = args[:2]
    tape = tape_of(to, x)
    if not isinstance(to, Standin):
        tape.refuse("it copies values into a tensor that is none of the parameter's state")
    if not isinstance(x, Standin):
        return tape.write("fill", to, s=_number(x, to))
    _same(to, x)
    if x.dtype != to.dtype:
        tape.refuse(f"it converts {x.dtype} to {to.dtype}")
    return tape.write("copy", to, x)


_FILLED = {"zeros": 0.0, "ones": 1.0, "zero": 0.0}


def _made(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """zeros_like, new_full and others."""
    x = args[0]
    tape = tape_of(args)
    if not isinstance(x, Standin):
        tape.refuse("it writes into a tensor that is none of the parameter's state")
    name = func._schema.name.removeprefix("aten::").removeprefix("new_").rstrip("_")
    name = name.removesuffix("_like")
    is_new = not _is_in_place(func)
    if func._schema.name.startswith("aten::new_") and tuple(args[1]) != tuple(Tensor.size(x)):
        tape.refuse("it makes a tensor of another shape than the parameter")
    dtype = kwargs.get("dtype") or x.dtype
    if dtype != x.dtype or not dtype.is_floating_point:
        tape.refuse(f"it makes a tensor of {dtype} beside a parameter of {x.dtype}")
    to = tape.new(Tensor.size(x), dtype) if is_new else x
    if name == "empty":
        return to
    s = _FILLED[name] if name in _FILLED else _number(args[-1], x)
    return tape.write("fill", to, s=s)


_on(
    *(_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default),
    *(_aten.empty_like.default, _aten.new_zeros.default, _aten.new_ones.default),
    *(_aten.new_full.default, _aten.new_empty.default, _aten.zero_.default),
    *(_aten.fill_.Scalar, _aten.fill_.Tensor),
)(_made)


@_on(
    *(_aten.detach.default, _aten.alias.default, _aten.view.default, _aten._unsafe_view.default),
    *(_aten.expand.default, _aten.lift_fresh.default, _aten.detach_.default),
)
def _alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if len(args) > 1 and tuple(args[1]) != tuple(Tensor.size(x)):
        x.tape.refuse("it views a tensor in another shape")
    return Standin(x.tape, x.register, Tensor.size(x), x.dtype)


# Those that don't go by the name of an operator on one tensor.
_EACH = {"clamp_min": "clamp_min", "clamp_max": "clamp_max", "maximum": "clamp_min"}
_EACH |= {"minimum": "clamp_max"}


@family("aten::_foreach_")
def _for_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On the CPU they call the operator on one tensor after the other."""
    name = func._schema.name.removeprefix("aten::_foreach_")
    in_place = name.endswith("_")
    base = name.rstrip("_")
    lists = [x for x in (*args, *kwargs.values()) if isinstance(x, list | tuple)]
    tape = tape_of(args, kwargs)
    handler = handlers.get(_overload(_EACH.get(base, base), in_place))
    if handler is None or not lists:
        tape.refuse(f"operator {func} can't be part of a program")
    one = _overload(_EACH.get(base, base), in_place)
    first = next(x for x in lists[0] if isinstance(x, Tensor))
    if (
        first.dtype.itemsize == 2
        and base in ("mul", "div")
        and not isinstance(args[1], list | tuple)
    ):
        tape.refuse(f"operator {func} rounds numbers to {first.dtype} first, as others do not")
    made = []
    for i in range(len(lists[0])):
        own = [x[i] if isinstance(x, list | tuple) else x for x in args]
        named = {k: x[i] if isinstance(x, list | tuple) else x for k, x in kwargs.items()}
        made.append(handler(one, tuple(own), named))
    return None if in_place else made


def _overload(name: str, in_place: bool) -> Any:
    """Some overload that tells the handler whether it is in place."""
    packet = getattr(_aten, f"{name}_" if in_place else name, None)
    found = [getattr(packet, o) for o in packet.overloads()] if packet is not None else []
    return next((o for o in found if o in handlers and "out" not in o._overloadname), None)
