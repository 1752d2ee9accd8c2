# SPDX-License-Identifier: BSD-3-Clause
"""Every operator of programs on a GPU, one each: the bits of PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from bits import different
from harness import On
from style_classes import Base
from test_operators import CALLS, ELEMENTWISE, special
from torch import Tensor
from traced import in_each_dtype

import optfuse
from optfuse._link import link_of


def _of_lists(formula: Any) -> Any:
    return lambda p, g: formula([p], [g])[0]


#: By name, of a parameter and its gradient.
LISTS = {name: _of_lists(formula) for name, formula in CALLS}
FORMULAS: dict[str, Any] = {**ELEMENTWISE, **LISTS}
NAMES = ["", *FORMULAS]  # by numbers, none of them 0
SIZES = (1, 37, 20_011)
TOGETHER = 16  # formulas of an optimizer: each has a trial


class EachOperator(Base):
    """The result of each group's formula goes into the state. In a trial nothing is done, so that
    no trial can refuse what is not equal; of groups whose options are numbers it takes two."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if "made" not in state:
            state["made"] = torch.zeros_like(p)
        if group["on"]:
            state["made"].copy_(FORMULAS[NAMES[group["formula"]]](p, grad))
        else:
            state["made"].copy_(grad)


def operands(on: On, dtype: torch.dtype, random: torch.Generator) -> list[torch.nn.Parameter]:
    """Parameters of all sizes, with gradients."""
    params = [torch.nn.Parameter(special(n, dtype, random).to(on.device)) for n in SIZES]
    for p in params:
        p.grad = special(p.numel(), dtype, random).to(on.device)
    return params


def groups_of(on: On, dtype: torch.dtype) -> tuple[list[dict[str, Any]], list[str]]:
    """A group for each formula, and those that PyTorch has not for this dtype and device."""
    random = torch.Generator().manual_seed(1)
    groups, none = [], []
    for i, name in enumerate(NAMES[1:], 1):
        if name in LISTS and not on.is_cuda:
            continue  # their roundings are not all played
        params = operands(on, dtype, random)
        try:
            FORMULAS[name](params[0].detach(), params[0].grad)
        except (RuntimeError, TypeError):
            none.append(name)
            continue
        groups.append({"params": params, "on": False, "formula": i})
    return groups, none


def step_is_traced(optimizer: Any, groups: list[dict[str, Any]]) -> bool:
    """Takes a step that applies the formulas of these groups: whether it was traced."""
    traced: Any = link_of(optimizer).traced
    before = traced.untraced
    for group in groups:
        group["on"] = True
    optimizer.step()
    for group in groups:
        group["on"] = False
    return bool(traced.untraced == before)


def differing(optimizer: Any, groups: list[dict[str, Any]]) -> Iterator[str]:
    for group in groups:
        name = NAMES[group["formula"]]
        for p in group["params"]:
            wanted = FORMULAS[name](p.detach(), p.grad).to(p.dtype).expand(p.shape)
            if different(optimizer.state[p]["made"], wanted):
                yield f"{name} of {p.numel()}"


def each_operator(on: On, dtype: torch.dtype) -> None:
    """Every operator of programs, one each, has PyTorch's bits."""
    groups, none = groups_of(on, dtype)
    differ: list[str] = []
    untraced: list[str] = []
    for at in range(0, len(groups), TOGETHER):
        optimizer: Any = optfuse.fuse(EachOperator(groups[at : at + TOGETHER]))
        every = optimizer.param_groups
        if step_is_traced(optimizer, every):
            differ += differing(optimizer, every)
            continue
        for group in every:  # one of them runs by the class itself, and all others with it
            if step_is_traced(optimizer, [group]):
                differ += differing(optimizer, [group])
            else:
                untraced.append(NAMES[group["formula"]])
    equal = len(groups) - len(differ) - len(untraced)
    print(f"{dtype}: {equal} operators have stock's bits; stock has not {none}")
    print(f"  {dtype}, run by the class itself: {untraced}")
    assert not differ, f"{len(differ)} have other bits: {differ}"
    assert equal > (300 if on.is_cuda else 60), f"{equal} operators only"


in_each_dtype("operators of programs", each_operator, modes=("forward",))
