# SPDX-License-Identifier: BSD-3-Clause
"""ATen's operators that make, fill and copy tensors, on a tape."""

from __future__ import annotations

from typing import Any

import torch

from optfuse._traced.operands import Args, Options, in_room, is_operand, number, on, real
from optfuse._traced.standin import Called, NotElementwise, Standin


def _dtype(x: Standin, options: Options) -> torch.dtype:
    """The dtype of a tensor that is made like x."""
    if torch.device(options.get("device") or x.tape.device) != x.tape.device:
        x.tape.refuse(f"it makes a tensor on {options['device']}")
    if options.get("layout") not in (None, torch.strided):
        x.tape.refuse(f"it makes a tensor of {options['layout']}")
    return options.get("dtype") or x.dtype


def _keeps_strides(x: Standin, options: Options) -> None:
    """That a tensor which is made like x gets the parameter's."""
    if options.get("memory_format") in (None, torch.preserve_format):
        return
    if x.tape.strides is not None or options["memory_format"] != torch.contiguous_format:
        raise NotElementwise("a tensor of other strides")


@on("clone.default", "_to_copy.default")
def _copy(called: Called, args: Args, options: Options) -> Any:
    x = args[0]
    in_room(x)
    _keeps_strides(x, options)
    dtype = _dtype(x, options)
    if dtype not in (x.dtype, x.tape.dtype) or x.dtype not in (torch.bool, x.tape.dtype):
        raise NotElementwise(f"{x.dtype} to {dtype}")
    return x.tape.write("copy", x.tape.new(dtype), x)


@on("copy")
def _copy_into(called: Called, args: Args, options: Options) -> Any:
    to, x = args[:2]
    if not called.in_place:
        raise NotElementwise(called.full_name)
    real(to)
    if not is_operand(x):
        return to.tape.write("fill", to, s=number(x, to))
    real(to, x)
    return to.tape.write("copy", to, x)


_VALUES = {"zeros": 0.0, "ones": 1.0}


@on("zeros_like", "ones_like", "full_like", "empty_like")
@on("new_zeros", "new_ones", "new_full", "new_empty")
def _make(called: Called, args: Args, options: Options) -> Any:
    x = args[0]
    if not isinstance(x, Standin) or called.in_place:
        raise NotElementwise(called.full_name)
    tape = x.tape
    is_new = called.name.startswith("new_")
    if tuple(args[1]) != tape.sizes if is_new else not is_operand(x) or x.form is not None:
        raise NotElementwise("another shape")
    if is_new and tape.strides is not None:
        raise NotElementwise("a contiguous tensor beside a parameter that is not")
    _keeps_strides(x, options)
    dtype = _dtype(x, options)
    if dtype != tape.dtype:
        raise NotElementwise(f"{dtype} beside a parameter of {tape.dtype}")
    to = tape.new(dtype)
    what = called.name.removesuffix("_like").removeprefix("new_")
    if what == "empty":
        return to
    s = _VALUES[what] if what in _VALUES else number(args[-1], x)
    return tape.write("fill", to, s=s)


@on("zero", "fill")
def _fill(called: Called, args: Args, options: Options) -> Any:
    to = args[0]
    if not called.in_place:
        raise NotElementwise(called.full_name)
    real(to)
    return to.tape.write("fill", to, s=number(args[1], to) if len(args) > 1 else 0.0)


@on("detach", "alias.default", "lift_fresh.default")
@on("view.default", "_unsafe_view.default", "expand.default")
def _alias(called: Called, args: Args, options: Options) -> Any:
    """Another tensor of the same memory."""
    x = args[0]
    in_room(x)
    if len(args) > 1 and tuple(args[1]) != x.tape.sizes:
        raise NotElementwise("a view in another shape")
    return Standin(x.tape, x.register, x.dtype)
