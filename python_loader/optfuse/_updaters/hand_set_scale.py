# SPDX-License-Identifier: BSD-3-Clause
"""A loss scale or an overflow flag that a script has set by hand: optimizer.grad_scale and
found_inf. On a GPU our kernels obey them, as GradScaler sets them there for fused=True; on the CPU
the class's own step() does."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from optfuse._dtensor.local_tensors import has_holes
from optfuse._gpu import is_gpu
from optfuse._library.bindings import Error, guard
from optfuse._noted import step_of
from optfuse._rules import Rule


def _is_set(optimizer: Optimizer) -> bool:
    return any(optimizer.__dict__.get(name) is not None for name in ("grad_scale", "found_inf"))


def refuse_without_fused(optimizer: Optimizer, rule: Rule) -> None:
    """Then the counters of parameters on a GPU are on the CPU, where no flag on the GPU reaches
    them."""
    if not rule.scales or not _is_set(optimizer):
        return
    others = (group for group in optimizer.param_groups if not group.get("fused"))
    if any(is_gpu(param.device) for group in others for param in group["params"]):
        raise Error(
            f"optfuse: {type(optimizer).__name__} takes grad_scale and found_inf on a GPU with "
            "fused=True only, and its own step() raises an AssertionError; make it with "
            "fused=True, or unscale the gradients first and delete the attributes. Nothing was "
            "updated"
        )


def has_scale(optimizer: Optimizer, rule: Rule) -> bool:
    """Whether one is set that a parameter on the CPU has to obey."""
    if not rule.scales and not rule.asserts_no_scale:
        return False
    if not _is_set(optimizer):
        return False
    if rule.asserts_no_scale:
        name = type(optimizer).__name__
        raise Error(
            f"optfuse: {name} takes no grad_scale and no found_inf, and its own step() raises an "
            "AssertionError; unscale the gradients first, and delete the attributes"
        )
    return any(param.is_cpu for group in optimizer.param_groups for param in group["params"])


def step_with_scale(optimizer: Optimizer, stock: type[Optimizer], rule: Rule) -> None:
    """By the implementation of PyTorch that takes a scale, whatever the groups select."""
    _check_memory(optimizer)
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


def _check_memory(optimizer: Optimizer) -> None:
    """PyTorch's kernel goes through the memory of all tensors in the same order, whatever their
    strides, and past its end where there is less of it than elements."""
    for number, group in enumerate(optimizer.param_groups):
        for i, param in enumerate(group["params"]):
            if param.grad is None or not param.is_cpu or not guard("by_hand"):
                continue
            state = optimizer.__dict__["state"].get(param, {}).values()
            beside = (x for x in state if isinstance(x, Tensor) and x.shape == param.shape)
            if not all(_lie_alike(x, param) for x in (param.grad, param, *beside)):
                raise Error(
                    f"optfuse: parameter {i} of group {number}, its gradient or its state has "
                    "holes or other strides, and PyTorch's kernel, which takes a grad_scale or "
                    "found_inf set by hand, mixes up their elements; make them contiguous, or "
                    "unscale the gradients yourself. Nothing was updated"
                )


def _lie_alike(tensor: Tensor, param: Tensor) -> bool:
    if tensor.is_contiguous() and param.is_contiguous():
        return True
    return tensor.stride() == param.stride() and not has_holes(tensor)
