# SPDX-License-Identifier: BSD-3-Clause
"""Stochastic rounding by PyTorch's operators: the reference of the kernels that round."""

from __future__ import annotations

import torch
from torch import Tensor

NARROW = (torch.bfloat16, torch.float16)
MOST_SEED = 2**53 - 1  # it is kept among options, which are doubles


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
