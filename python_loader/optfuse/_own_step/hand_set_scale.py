# SPDX-License-Identifier: BSD-3-Clause
"""A loss scale or an overflow flag that a script has set by hand: optimizer.grad_scale and
found_inf. On a GPU our kernels obey them, as GradScaler sets them there; on the CPU the class's own
step() does."""

from __future__ import annotations

from torch.optim import Optimizer

from optfuse._own_step.twin import step_of
from optfuse._rules import Rule


def has_scale(optimizer: Optimizer, rule: Rule) -> bool:
    """Whether one is set that a parameter on the CPU has to obey."""
    if not rule.scales:
        return False
    scale, inf = map(optimizer.__dict__.get, ("grad_scale", "found_inf"))
    if scale is None and inf is None:
        return False
    return any(param.is_cpu for group in optimizer.param_groups for param in group["params"])


def step_with_scale(optimizer: Optimizer, stock: type[Optimizer], rule: Rule) -> None:
    """By the implementation of PyTorch that takes a scale, whatever the groups select."""
    selected = []
    try:
        for group in optimizer.param_groups:
            flags = rule.flags(group)
            selected.append({flag: group[flag] for flag in flags})
            group.update(flags)
        step_of(stock)(optimizer)
    finally:
        for group, flags in zip(optimizer.param_groups, selected, strict=False):
            group.update(flags)
