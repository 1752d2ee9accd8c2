# SPDX-License-Identifier: BSD-3-Clause
"""Stochastic rounding by PyTorch's operators: the reference of the kernels that round."""

from __future__ import annotations

import math
from typing import Any

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
    """Rounds stochastically what is of 16 bits, with the integers of its places in memory; those
    in the memory of the whole if it is a rank's part of a DTensor."""
    first, local, numbers = 0, to, wide
    if hasattr(to, "placements"):
        first, local, numbers = _first_of(to), _local_of(to), _local_of(wide)
        torch.autograd.graph.increment_version(to)
    integers = torch.empty_like(local, dtype=torch.int32, memory_format=torch.preserve_format)
    torch.ops.optfuse.draw(integers, to.dtype, seed, step, parameter, stream, first)
    local.copy_(rounded(numbers, to.dtype, integers))


def _local_of(sharded: Any) -> Tensor:
    local: Tensor = sharded.to_local()
    return local


def _first_of(sharded: Any) -> int:
    """Elements of the whole that come before those of this rank, which has whole rows of it: as
    torch.chunk() splits them."""
    split = [i for i, place in enumerate(sharded.placements) if not place.is_replicate()]
    if not split:
        return 0
    place = sharded.placements[split[0]]
    if len(split) > 1 or type(place).__name__ != "Shard" or not place.is_shard(0):
        raise RuntimeError(
            "stochastic rounding takes parameters that are sharded once, by their first dimension, "
            f"and this one, of shape {tuple(sharded.shape)}, is {sharded.placements}"
        )
    mesh, rows = sharded.device_mesh, int(sharded.shape[0])
    before = math.ceil(rows / mesh.size(split[0])) * int(mesh.get_local_rank(split[0]))
    return int(min(before, rows) * math.prod(sharded.shape[1:]))
