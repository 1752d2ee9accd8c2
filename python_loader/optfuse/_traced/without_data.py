# SPDX-License-Identifier: BSD-3-Clause
"""The forms and dtypes of an operator's results, which PyTorch finds without data, by Python that
takes longer than all else of a call. They are remembered: results() gets nothing but what they
depend on, and makes the tensors of it."""

from __future__ import annotations

import functools
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


# Without data a float that is an argument of these is as good as any other, of others maybe not: it
# may be out of range. Steps mostly come with other numbers than the steps before.
ANY_FLOAT = frozenset(
    f"aten::{name}{end}"
    for name in ("add", "sub", "rsub", "mul", "div", "lerp", "addcmul", "addcdiv")
    for end in ("", "_")
)
_A_FLOAT = Plain(1.0, float)


def settings() -> tuple[Any, ...]:
    """The settings of the process on which results depend, or whether there are any."""
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


def plain(x: Any, any_float: bool = False) -> Plain:
    """any_float: the operator is one of ANY_FLOAT."""
    if any_float and isinstance(x, float):
        return _A_FLOAT
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
