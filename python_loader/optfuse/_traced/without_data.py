# SPDX-License-Identifier: BSD-3-Clause
"""The forms and dtypes of an operator's results, which PyTorch finds without data, by Python that
takes longer than all else of a call. They are remembered: results() gets nothing but what they
depend on, and makes the tensors of it."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST = 4096  # calls that are remembered


class Blank(NamedTuple):
    """A tensor without data."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None  # None: it is contiguous
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        if self.strides is None:
            return torch.empty(self.sizes, device="meta", dtype=self.dtype)
        return torch.empty_strided(self.sizes, self.strides, device="meta", dtype=self.dtype)


class Plain(NamedTuple):
    """An argument that is no tensor. By the type it differs from others that are equal: 1, True."""

    value: Any
    type: type


def settings() -> tuple[Any, ...]:
    """The settings of the process on which results depend, or whether there are any."""
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


def plain(x: Any, is_pointwise: bool) -> Plain:
    """Where each element is computed from those in the same place, a number changes by no more than
    its sign, or by being zero, infinite or NaN, what there is without data: errors. Others change
    at each step."""
    if isinstance(x, float) and is_pointwise and x and math.isfinite(x):
        x = math.copysign(1.0, x)
    return Plain(x, type(x))


@functools.lru_cache(MOST)
def results(
    func: Any, args: tuple[Any, ...], options: tuple[tuple[str, Any], ...], now: tuple[Any, ...]
) -> Any:
    """args, options: of Blank, Plain and tuples of these. now: settings(). Gives a Blank with
    strides for each tensor that the operator gives. Raises what the operator raises."""
    return _blank(func(*map(_made, args), **{name: _made(x) for name, x in options}))


def _made(x: Any) -> Any:
    if isinstance(x, Blank):
        return x.tensor()
    return x.value if isinstance(x, Plain) else list(map(_made, x))


def _blank(made: Any) -> Any:
    if isinstance(made, list | tuple):
        return type(made)(map(_blank, made))
    return made if made is None else Blank(tuple(made.shape), made.stride(), made.dtype)
