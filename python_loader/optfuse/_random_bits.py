# SPDX-License-Identifier: BSD-3-Clause
"""random_bits(): the integers of stochastic rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optfuse._arguments.check import Kind, checked, need, whole
from optfuse._rounding import MOST_SEED, NARROW


def _up_to(most: int, shown: str) -> Kind:
    return whole(f"a whole number from 0 to {shown}", 0, most)


def _shape(value: object) -> tuple[int, ...]:
    need(isinstance(value, Sequence) and not isinstance(value, str | bytes))
    return tuple(whole("", 0).take(size) for size in value)  # type: ignore[attr-defined]


def _dtype(value: object) -> object:
    need(value in NARROW)
    return value


@checked(
    seed=_up_to(MOST_SEED, "2**53 - 1"),
    step=_up_to(2**32 - 1, "2**32 - 1"),
    parameter=_up_to(2**24 - 1, "2**24 - 1"),
    stream=_up_to(255, "255"),
    shape=Kind("the sizes of a tensor", _shape),
    dtype=Kind("torch.bfloat16 or torch.float16", _dtype),
    first=_up_to(2**62, "2**62"),
)
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
    nothing else: the words of Philox4x32-10, whose layout is in docs/numerics.md. Raises
    optfuse.Error for an argument out of its range.
    """
    to = torch.empty(shape, dtype=torch.int32, device="cpu")
    torch.ops.optfuse.draw(to, dtype, seed, step, parameter, stream, first)
    return to
