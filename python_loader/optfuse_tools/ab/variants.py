# SPDX-License-Identifier: BSD-3-Clause
"""The variants of ab(): the given optimizer as it is, as PyTorch's other implementations have
it, and fused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from optfuse._fuse import fuse
from optfuse._gpu import is_gpu
from optfuse._rules import RULES

Wrap = Callable[[Optimizer], Optimizer]
Iteration = Callable[[], "torch.Tensor | float | None"]
BuildFn = Callable[[Wrap], Iteration]


class NoOptimizer(Optimizer):
    """Has the groups and the zero_grad() of the given optimizer; step() updates nothing."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        self.steps = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.steps += 1
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()


def with_flags(optimizer: Optimizer, **flags: bool | None) -> Optimizer:
    """A new stock optimizer like the given one, with other implementation flags."""
    kind = type(optimizer)
    missing = [name for name, value in flags.items() if value and name not in optimizer.defaults]
    if missing:
        raise ValueError(f"{kind.__name__} has no {missing[0]}")
    flags = {name: value for name, value in flags.items() if name in optimizer.defaults}
    accepted = inspect.signature(kind).parameters
    options = {k: v for k, v in {**optimizer.defaults, **flags}.items() if k in accepted}
    return kind([{**group, **flags} for group in optimizer.param_groups], **options)


def reference_flags(optimizer: Optimizer) -> dict[str, bool | None]:
    """Flags of the implementation whose bits fusion has (docs/numerics.md); none: as it is."""
    rule, groups = RULES.get(type(optimizer)), optimizer.param_groups
    if rule is None or (rule.tried and any(is_gpu(p.device) for g in groups for p in g["params"])):
        return {}
    if rule.reference == "fused=True":
        return {"fused": True, "foreach": None}
    by_loop = rule.reference == "foreach=False" and any(map(rule.difference, groups))
    return {"foreach": False} if by_loop else {}


def reference(optimizer: Optimizer) -> Optimizer:
    flags = reference_flags(optimizer)
    return with_flags(optimizer, **flags) if flags else optimizer


#: Variants that ab() compares by default. The names also choose ab()'s baseline.
VARIANTS: Mapping[str, Wrap] = {
    "no optimizer": NoOptimizer,
    "default": lambda optimizer: optimizer,
    "foreach=True": partial(with_flags, foreach=True, fused=None),
    "fused=True": partial(with_flags, fused=True, foreach=None),
    "backward fusion": lambda optimizer: fuse(optimizer, mode="backward"),
    "forward fusion": lambda optimizer: fuse(optimizer, mode="forward"),
}
