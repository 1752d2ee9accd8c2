# SPDX-License-Identifier: BSD-3-Clause
"""Muon's matrix products on a GPU: cuBLAS makes those for which a trial on that GPU has
shown the bits of PyTorch's operators, and these make the others (shim/matrix/newton_schulz.h).

The trial is for each shape of the parameters, because cuBLAS chooses its algorithms by
shapes. It does not see the class's step(); the trial of _trials/stock_trial.py does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from optfuse._gpu import is_gpu
from optfuse._rules import Group, Rule

_NO_TRIAL = "there was no trial"  # of newton_schulz.cpp
_COEFFICIENTS = ("ns_coefficients.0", "ns_coefficients.1", "ns_coefficients.2")


class Kind(NamedTuple):
    """Matrices that are multiplied alike."""

    device: torch.device
    rows: int
    columns: int
    by_rows: bool  # they lie in memory row by row; else column by column
    coefficients: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns} on {self.device}"


def kinds(rule: Rule, groups: list[Group]) -> list[Kind]:
    """The matrix products in an optimizer's updates on GPUs; none if its rule has none."""
    return list(dict.fromkeys(_each(rule, groups)))


def _each(rule: Rule, groups: list[Group]) -> Iterator[Kind]:
    if not set(_COEFFICIENTS) <= set(rule.options):
        return
    for group in filter(rule.is_native, groups):
        numbers = dict(zip(rule.options, rule.hyper(group), strict=True))
        coefficients = tuple(numbers[name] for name in _COEFFICIENTS)
        for param in group["params"]:
            if is_gpu(param.device) and param.dim() == 2:
                rows, columns = param.shape
                yield Kind(param.device, rows, columns, _lies_by_rows(param), coefficients)


def _lies_by_rows(param: Tensor) -> bool:
    """Whether a parameter lies by rows, as its gradients and states do, which are dense."""
    return param.stride() != (1, param.shape[0])


def make(rule: Rule, groups: list[Group]) -> None:
    """The trials of those kinds that had none yet in this process."""
    for kind in kinds(rule, groups):
        if why(kind) == _NO_TRIAL:
            try:
                torch.ops.optfuse.try_products(_numbers(kind), kind.coefficients)
            except RuntimeError:  # no memory for it: there was no trial
                continue


def why(kind: Kind) -> str:
    """Why PyTorch's operators multiply these; empty if cuBLAS does."""
    device, rows, columns, by_rows, coefficients = kind
    answer: str = torch.ops.optfuse.why_operators(device, rows, columns, by_rows, coefficients)
    return answer


def reasons(rule: Rule, groups: list[Group]) -> list[str]:
    """Why, and which ones."""
    found: dict[str, list[Kind]] = {}
    for kind in kinds(rule, groups):
        found.setdefault(why(kind), []).append(kind)
    return [
        f"{reason} ({some[0]}" + (f" and {len(some) - 1} others)" if some[1:] else ")")
        for reason, some in found.items()
        if reason
    ]


def _numbers(kind: Kind) -> Tensor:
    """Random ones, of norm 1 about, as what Muon iterates on."""
    random = torch.Generator("cpu").manual_seed(0)
    shape = (kind.rows, kind.columns) if kind.by_rows else (kind.columns, kind.rows)
    whole = torch.empty(shape, dtype=torch.bfloat16, device="cpu")
    edge = math.sqrt(3 / max(1, whole.numel()))
    whole = whole.uniform_(-edge, edge, generator=random).to(kind.device)
    return whole if kind.by_rows else whole.t()
