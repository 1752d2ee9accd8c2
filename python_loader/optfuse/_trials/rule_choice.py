# SPDX-License-Identifier: BSD-3-Clause
"""The rule that updates an optimizer: the kernels' rule for its class, if it has the class's bits
for all of its parameters, else RECORDED."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from optfuse._dtensor.local_tensors import has_holes, is_dtensor
from optfuse._gpu import is_gpu, is_on_gpu
from optfuse._rules import RECORDED, RULES, Group, Rule
from optfuse._trials import stock_trial
from optfuse._trials.own_thread import sets_no_threads

FuseBy = Callable[[Optimizer, Rule], Optimizer]  # fuses a small copy by a rule, for a trial


def rule_of(optimizer: Optimizer) -> Rule:
    """The rule for an optimizer that is not fused; RECORDED, and why, if there are no kernels for
    all of its parameters."""
    rule = RULES[type(optimizer)]
    why = _why_recorded(optimizer)
    if why:
        return replace(RECORDED, because=tuple(why))
    return rule.on_gpus() if rule.tried and _any_on_gpu(optimizer.param_groups) else rule


def try_with_stock(stock: type[Optimizer], groups: list[Group], fuse: FuseBy) -> None:
    """Tries whether our update has the bits of the class's own step(), where that is not known;
    once for each kind of parameters."""
    rule = RULES.get(stock)
    if rule is None or not any(stock_trial.kinds(rule, stock, groups)):
        return

    def fuse_for_trial(small: Optimizer) -> Optimizer:
        on_gpu = rule.tried and is_gpu(small.param_groups[0]["params"][0].device)
        return fuse(small, rule.on_gpus() if on_gpu else rule)

    make = sets_no_threads(lambda groups: stock_trial.make(stock, groups, rule, fuse_for_trial))
    make(groups)


#: Parameters for which rules that round have no kernels.
_NOT_ROUNDED: dict[str, Callable[[Tensor], bool]] = {
    "are float64": lambda p: p.dtype is torch.float64,
    "are DTensors": is_dtensor,
}


def _is_narrow_with_holes(param: Tensor) -> bool:
    is_on_cpu = param.device.type == "cpu"
    return is_on_cpu and param.dtype.itemsize == 2 and has_holes(param)


def _any_on_gpu(groups: list[Group]) -> bool:
    return any(is_gpu(p.device) for group in groups for p in group["params"])


def _why_recorded(optimizer: Optimizer) -> list[str]:
    """Why an optimizer with another update does without it."""
    stock, groups = type(optimizer), optimizer.param_groups
    if stock not in RULES:
        return []
    return why_not_tried(RULES[stock], stock, groups, optimizer.__dict__["state"])


def why_not_tried(
    rule: Rule, stock: type[Optimizer], groups: list[Group], state: dict[Any, Any]
) -> list[str]:
    """Why an update that has to pass a trial is not used for these groups."""
    params = [p for group in groups for p in group["params"]]
    if rule.rounds and (
        found := [kind for kind, is_it in _NOT_ROUNDED.items() if any(map(is_it, params))]
    ):
        return [f"some parameters {' and '.join(found)}, for which there are no kernels"]
    if rule.reference != "fused=True" and any(map(_is_narrow_with_holes, params)):
        return ["some parameters of 16 bits have holes, where PyTorch's operators round more often"]
    if rule.tried and _any_on_gpu(groups):
        return _reasons_on_gpu(rule, stock, groups, state)
    return stock_trial.verdicts(rule, stock, groups)


def _reasons_on_gpu(
    rule: Rule, stock: type[Optimizer], groups: list[Group], state: dict[Any, Any]
) -> list[str]:
    """Why the class's own step() has to update there; empty if kernels may."""
    counts_on_gpu = rule.numbers_on_gpu()
    found = sorted({f"of {way}" for group in groups for way in stock_trial.other_ways(group)})
    params = [p for group in groups for p in group["params"]]
    if counts_on_gpu:
        found += other_counters(params, state, counts_on_gpu)
    elif any(is_on_gpu(state[p].get("step")) for p in params if p in state):
        found.append("its step counters are on the GPU")
    if not all(is_gpu(p.device) for p in params):
        found.append("some parameters are on the CPU")
    if any(map(_has_subclasses, groups)):
        found.append("some parameters are of a subclass")
    return found or stock_trial.verdicts(rule, stock, groups)


def _has_subclasses(group: Group) -> bool:
    """Whether PyTorch, where it may choose, takes its for-loop because of a subclass."""
    chooses = "foreach" in group and group["foreach"] is None
    return chooses and any(type(p) not in (Tensor, Parameter) for p in group["params"])


def other_counters(
    params: list[Tensor], state: dict[Any, Any], names: tuple[str, ...]
) -> list[str]:
    """How counters on the GPU differ from the usual ones. They meet parameters in
    operators, which convert them to the parameter's dtype if that one has dimensions."""
    found = []
    counters = [state[p].get(name) for p in params if state.get(p) for name in names]
    usual = all(is_on_gpu(c) and c.dtype is torch.float32 and c.dim() == 0 for c in counters)
    if not usual or torch.get_default_dtype() is not torch.float32:
        found.append(f"its {', '.join(names)} are not all float32 on the GPU")
    if any(p.dim() == 0 for p in params):
        found.append("some parameters have no dimensions")
    return found
