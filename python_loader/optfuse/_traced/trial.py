# SPDX-License-Identifier: BSD-3-Clause
"""Before programs take the place of a class's step(): does tracing it give its bits, here?

fuse() first finds out that step() treats parameters independently (_own_step/trial.py), as one
program for many of them needs. Then two optimizers of small copies of the parameters take the
same steps, one by the class's own step() on all of them, the other traced: parameters, gradients,
state, options and attributes must be equal by bits after each step."""

from __future__ import annotations

import math
import random as python_random
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._native import guard
from optfuse._own_step import twin
from optfuse._own_step.register import check_promise
from optfuse._own_step.settings import SETTINGS
from optfuse._own_step.small import RUNS, Kind, Run, Small, gradients, small_copies, with_a_rate
from optfuse._own_step.trial import enter_training
from optfuse._own_step.untouched import untouched
from optfuse._random import random_as_it_was
from optfuse._traced.rule import TracedRule, traced_rule
from optfuse._traced.standin import Untraceable
from optfuse._values import deep_copy, difference

Fuse = Callable[[Optimizer, TracedRule], Optimizer]
ODD = 7  # elements of a dimension: then some take the reference's scalar code
# Parameters and gradients in which every other number is one of these.
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 3e38, 1.0, -1.0, 65504.0)
MIXED = (Run(("mixed",) * 3), Run(("mixed",) * 3, large=True), Run(("mixed", 1.0, "mixed")))


def try_traced(optimizer: Optimizer, stock: type[Optimizer], fuse: Fuse) -> TracedRule:
    """The rule by which its updates have the class's bits. fuse: fuses by a rule. Raises
    Untraceable, and optfuse.Error where step() does not treat parameters independently or can't be
    tried, with nothing changed."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.device.type != "cpu":
                raise Untraceable(
                    f"it has parameters on {param.device}, and programs run on the CPU"
                )
    rule = traced_rule(check_promise(optimizer, stock))
    random = torch.Generator().manual_seed(0)
    with random_as_it_was(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with untouched(optimizer, f"{stock.__module__}.{stock.__qualname__}"):
            for run in (*RUNS, *MIXED):
                smalls = small_copies(optimizer, random, run.large, ODD)
                _compare(optimizer, stock, smalls, run, random, lambda small: fuse(small, rule))
    return rule


def _compare(
    optimizer: Optimizer,
    stock: type[Optimizer],
    smalls: list[Small],
    run: Run,
    random: torch.Generator,
    fuse: Callable[[Optimizer], Optimizer],
) -> None:
    theirs = _copy_of(optimizer, stock, smalls)
    copies = [
        Small(s.name, s.group, s.param.detach().clone(), deep_copy(s.entry, "the state"))
        for s in smalls
    ]
    for small, made in zip(smalls, copies, strict=True):
        made.param.requires_grad_(small.param.requires_grad)
    ours = _copy_of(optimizer, stock, copies)
    if run.steps[0] == "mixed":
        for small, made in zip(smalls, copies, strict=True):
            mixed = _mixed(small.param, random)
            small.param.detach().copy_(mixed)
            made.param.detach().copy_(mixed)
    for one in (theirs, ours):
        enter_training(one)
    fuse(ours)
    take = twin.step_of(stock)
    for step, kind in enumerate(run.steps):
        given = list(gradients(smalls, kind, step, random))
        if kind == "mixed":
            given = [_mixed(small.param, random) for small in smalls]
        for small, made, grad in zip(smalls, copies, given, strict=True):
            small.param.grad = None if grad is None else grad.clone()
            made.param.grad = grad
        _seed(step)
        try:
            take(theirs)
        except Exception:
            return  # it takes no such gradients
        _seed(step)
        _take_traced(ours, kind)
        _look_at(theirs, ours, list(zip(smalls, copies, strict=True)), step, kind)


def _mixed(like: Tensor, random: torch.Generator) -> Tensor:
    """Normally distributed numbers and special ones."""
    shape = tuple(like.shape)
    plain = torch.randn(shape, generator=random, dtype=torch.float32, device="cpu")
    which = torch.randint(2 * len(SPECIAL), shape, generator=random, device="cpu")
    special = torch.tensor((*SPECIAL, *SPECIAL), device="cpu")[which]
    return torch.where(which < len(SPECIAL), special, plain).to(like.dtype)


def _take_traced(ours: Optimizer, kind: Kind) -> None:
    try:
        ours.step()
    except Untraceable:
        raise
    except Exception as error:
        raise Untraceable(f"the trial of its program failed: {error}") from error


def _seed(step: int) -> None:
    python_random.seed(step)
    torch.default_generator.manual_seed(step)


def _copy_of(optimizer: Optimizer, stock: type[Optimizer], smalls: list[Small]) -> Optimizer:
    """An optimizer like this one, with all these parameters."""
    indices = sorted({small.group for small in smalls})
    options = [with_a_rate(twin.options_of(optimizer.param_groups[i])) for i in indices]
    attributes, groups = deep_copy((twin.attributes_of(optimizer), options), SETTINGS)
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    for index, group in zip(indices, groups, strict=True):
        group["params"] = [small.param for small in smalls if small.group == index]
    for small in smalls:
        if small.entry is not None:
            state[small.param] = small.entry
    whole = stock.__new__(stock)
    whole.__dict__ = {**attributes, "param_groups": groups, "state": state}
    return whole


def _look_at(
    theirs: Optimizer, ours: Optimizer, pairs: list[tuple[Small, Small]], step: int, kind: Kind
) -> None:
    what = f"after step {step + 1} of a trial, with gradients {kind},"
    for real, made in pairs:
        place = (
            difference("the parameter", made.param.detach(), real.param.detach())
            or difference("the gradient", made.param.grad, real.param.grad)
            or difference("state", _entry(ours, made.param), _entry(theirs, real.param))
        )
        if place is not None and guard("traced_bits"):
            raise Untraceable(f"{what} {place} of a small copy of {real.name} has other bits")
    for i, (group, own) in enumerate(zip(ours.param_groups, theirs.param_groups, strict=True)):
        place = difference("", twin.own_options(group), twin.own_options(own))
        if place is not None:
            raise Untraceable(f"{what} option {place} of group {i} differs")
    place = difference(
        "", twin.own_attributes(_without_link(ours)), twin.own_attributes(theirs.__dict__)
    )
    if place is not None:
        raise Untraceable(f"{what} the optimizer's attribute {place} differs")


def _entry(optimizer: Optimizer, param: Tensor) -> Any:
    return optimizer.__dict__["state"].get(param) or {}


def _without_link(optimizer: Optimizer) -> dict[str, Any]:
    return {k: v for k, v in optimizer.__dict__.items() if k not in twin.HIDDEN}
