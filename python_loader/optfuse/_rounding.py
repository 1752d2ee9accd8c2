# SPDX-License-Identifier: BSD-3-Clause
"""Stochastic rounding by PyTorch's operators: the reference of the kernels that round."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NARROW = (torch.bfloat16, torch.float16)
#: The largest of each argument. A seed is kept among options, which are doubles.
MOST = {"seed": 2**53 - 1, "step": 2**32 - 1, "parameter": 2**24 - 1, "stream": 255}


def random_bits(
    seed: int,
    step: int,
    parameter: int,
    stream: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    first: int = 0,
) -> Tensor:
    """The random integers with which an optimizer of optfuse.optim rounds stochastically.

    seed: of the group of parameters, as its option.
    step: the number of the update, from 1 on, as state["step"] has it then.
    parameter: the number that state_dict() has for the parameter.
    stream: 0 for the parameter; 1, 2, ... for the tensors of its state, in the order of STATE.
    shape: of the result. Elements are counted in the order of memory, which is that of a
        contiguous tensor here.
    dtype: what is rounded to: torch.bfloat16 takes 16 bits an element, torch.float16 32.
    first: the place of the result's first element in the parameter.

    Returns an int32 tensor on the CPU: of numbers from 0 to 65535 for bfloat16, and for float16 of
    32 bits each, of which half are negative as int32. They are a function of the arguments and of
    nothing else: the words of Philox4x32-10, whose layout is in docs/numerics.md. Raises ValueError
    for an argument out of its range.
    """
    given = {"seed": seed, "step": step, "parameter": parameter, "stream": stream}
    for name, value in {**given, "first": first}.items():
        most = MOST.get(name, 2**62)
        if not (isinstance(value, int) and 0 <= value <= most):
            raise ValueError(f"Invalid {name}, a whole number from 0 to {most}: {value}")
    if dtype not in NARROW:
        raise ValueError(f"Invalid dtype, torch.bfloat16 or torch.float16: {dtype}")
    to = torch.empty(shape, dtype=torch.int32, device="cpu")
    torch.ops.optfuse.draw(to, dtype, seed, step, parameter, stream, first)
    return to


def rounded(wide: Tensor, dtype: torch.dtype, integers: Tensor) -> Tensor:
    """float32 numbers in a dtype of 16 bits: away from zero with the probability of what is cut
    off, which the integers decide. NaN, infinities and the signs of zeros stay. integers: as
    random_bits() gives them for this dtype, of the same shape."""
    if dtype is torch.bfloat16:
        moved = wide.view(torch.int32).add(integers).bitwise_and_(-65536).view(torch.float32)
        return torch.where(wide.isnan(), wide, moved).to(dtype)
    bits, draws = wide.view(torch.int32), integers.long() & 0xFFFFFFFF
    usual = (bits + (draws >> 19).int()).bitwise_and_(-8192).view(torch.float32)
    units = wide.abs() * 2.0**24  # numbers below 2^-14 lie 2^-24 apart
    whole_units = torch.where(units < 1024, units, 0).trunc()
    fraction = ((units - whole_units).double() * 2.0**32).clamp(0, 2.0**32 - 1).long()
    small = (whole_units + (fraction + draws >> 32)) * 2.0**-24
    found = torch.where(units < 1024, small.copysign(wide), usual)
    return torch.where(wide.isnan(), wide, found).to(dtype)


def store(to: Tensor, wide: Tensor, seed: int, step: int, parameter: int, stream: int) -> None:
    """Rounds stochastically what is of 16 bits, with the integers of its places in memory."""
    integers = torch.empty_like(to, dtype=torch.int32, memory_format=torch.preserve_format)
    torch.ops.optfuse.draw(integers, to.dtype, seed, step, parameter, stream, 0)
    to.copy_(rounded(wide, to.dtype, integers))
