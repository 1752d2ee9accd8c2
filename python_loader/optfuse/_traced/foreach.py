# SPDX-License-Identifier: BSD-3-Clause
"""ATen's operators on lists, on a tape: on the CPU they call the operator on one tensor
after the other. On GPUs some of them round otherwise."""

from __future__ import annotations

from typing import Any

import torch

# They come first: the handlers of the operators on one tensor.
import optfuse._traced.copies
import optfuse._traced.masks
import optfuse._traced.operators  # noqa: F401
from optfuse._traced.operands import Args, Options
from optfuse._traced.standin import (
    CPU,
    Branch,
    Call,
    Called,
    Handler,
    Line,
    NotElementwise,
    handlers,
    put_handler,
    tape_of,
)

_PREFIX = "_foreach_"
_LISTS = (list, tuple)
# Those that don't go by the name of an operator on one tensor.
_NAMES = {"maximum": "clamp_min", "minimum": "clamp_max"}


def _each(handler: Handler, one: Called) -> Handler:
    multiplies, powers = one.name in ("mul", "div"), one.name == "pow"

    def for_each(called: Called, args: Args, options: Options) -> Any:
        lists = [x for x in (*args, *options.values()) if type(x) in _LISTS]
        tape = tape_of(args, options)
        if "out" in options or not lists:
            raise NotElementwise(called.full_name)
        on_cpu = tape.device == CPU
        if multiplies and tape.dtype.itemsize == 2 and not _of_tensors(args[1]) and on_cpu:
            raise NotElementwise(f"{called.full_name} rounds numbers to {tape.dtype} first")
        if powers and not on_cpu:
            raise NotElementwise(f"{called.full_name} takes a library's pow() on GPUs")
        n = len(tape.lines)
        made = [
            handler(
                one,
                tuple([x[i] if type(x) in _LISTS else x for x in args]),
                {k: x[i] if type(x) in _LISTS else x for k, x in options.items()},
            )
            for i in range(len(lists[0]))
        ]
        if not on_cpu:
            names = _OF_LISTS if type(args[-1]) in _LISTS else _OF_ONE_NUMBER
            tape.lines[n:] = [_renamed(line, names) for line in tape.lines[n:]]
        return None if called.in_place else made

    return for_each


def _of_tensors(x: Any) -> bool:
    return type(x) in _LISTS and all(isinstance(item, torch.Tensor) for item in x)


# Operators that are others on lists. One number for all tensors divides them as it does one.
_OF_ONE_NUMBER = {name: f"{name}_list" for name in ("maximum", "minimum")}
_OF_LISTS = {**_OF_ONE_NUMBER, "div_number": "div_number_list"}


def _renamed(line: Line | Call | Branch, names: dict[str, str]) -> Line | Call | Branch:
    return line if isinstance(line, Call | Branch) else (names.get(line[0], line[0]), *line[1:])


def _put(packet: Any, name: str, handler: Handler) -> None:
    for overload in packet.overloads():
        func = getattr(packet, overload)
        called = Called(name, func._schema.is_mutable, str(func))
        put_handler(func, _each(handler, called), called)


def _put_all() -> None:
    on_one = {called.name: handler for handler, called in handlers.values()}
    for spelled in dir(torch._C._VariableFunctions):
        name = spelled.removeprefix(_PREFIX).rstrip("_")
        name = _NAMES.get(name, name)
        if spelled.startswith(_PREFIX) and name in on_one:
            _put(getattr(torch.ops.aten, spelled), name, on_one[name])


_put_all()
