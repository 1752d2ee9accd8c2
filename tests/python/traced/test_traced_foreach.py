# SPDX-License-Identifier: BSD-3-Clause
"""Operators on lists in a traced step(): each, in place and not, with every kind of second operand,
has the bits of the operator itself. The table is made of the schemas that this torch has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from common import python_ok
from test_traced_operators import special
from torch import Tensor, nn
from traced_classes import Base

import optfuse
from optfuse._link import link_of
from optfuse._trials.compare import difference

Formula = Callable[[list[Tensor], list[Tensor]], Any]
PREFIX = "_foreach_"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = (1, 5, 37, 1003)
NUMBERS = {"float": 1.2345, "int": 3, "bool": True, "numpy": np.float64(1.2345)}
NUMBERS |= {"numpy32": np.float32(1.2345), "one": 1.0}
POINTS = {
    "0-dim": torch.tensor(1.2345),
    "0-dim float64": torch.tensor(1.2345, dtype=torch.float64),
    "0-dim bfloat16": torch.tensor(1.2345, dtype=torch.bfloat16),
    "0-dim integer": torch.tensor(3),
}
OTHERS = {"_foreach_mm"}  # of matrices


def _operands(kind: str, name: str) -> dict[str, Any]:
    """Stands for an argument: it gets the lists of parameters and gradients."""
    if kind == "number":
        return {k: lambda p, g, x=x: x for k, x in NUMBERS.items()}
    if kind == "List[number]":
        return {f"{k}s": lambda p, g, x=x: [x] * len(p) for k, x in NUMBERS.items()}
    if kind == "List[Tensor]":
        return {"list": lambda p, g: g}
    if kind == "Tensor" and name != "scalars":  # which is a tensor that no program knows
        return {k: lambda p, g, x=x: x for k, x in POINTS.items()}
    return {}


def _calls() -> Iterator[tuple[str, Formula]]:
    for spelled in dir(torch._C._VariableFunctions):
        if not spelled.startswith(PREFIX) or spelled in OTHERS:
            continue
        packet = getattr(torch.ops.aten, spelled)
        for overload in packet.overloads():
            if overload.endswith("out"):
                continue
            arguments = getattr(packet, overload)._schema.arguments
            if str(arguments[0].type) != "List[Tensor]":
                continue
            middle = [a for a in arguments[1:] if not a.has_default_value()]
            kinds = [_operands(str(a.type), a.name) for a in middle]
            last = arguments[1:][len(middle) :]
            more: list[dict[str, Any]] = [{}]
            if last and last[0].name in ("alpha", "value"):
                more += [{last[0].name: x} for x in (0.3, 2)]
            first = kinds[:-1]
            for label, operand in kinds[-1].items() if kinds else [("", None)]:
                for options in more:
                    of = [next(iter(kind.values())) for kind in first]
                    of += [] if operand is None else [operand]
                    name = f"{spelled}.{overload} {label} {options or ''}".strip()
                    yield name, _formula(spelled, of, options)


def _formula(spelled: str, of: list[Any], options: dict[str, Any]) -> Formula:
    function = getattr(torch, spelled)

    def formula(p: list[Tensor], g: list[Tensor]) -> list[Tensor]:
        given = [x.clone() for x in p]
        made = function(given, *(operand(p, g) for operand in of), **options)
        return given if spelled.endswith("_") else made

    return formula


NAMED = [("", lambda p, g: g), *_calls()]  # by numbers, none of them 0


class OnLists(Base):
    """The results of each group's operator on its parameters and gradients go into the state. In a
    trial nothing is done, so that no trial can refuse what is not equal. Of groups whose options
    are numbers a trial takes two."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if "made" not in state:
            state["made"] = torch.zeros_like(p)
        if group["on"]:
            (made,) = NAMED[group["which"]][1]([p], [grad])
            state["made"].copy_(made)
        else:
            state["made"].copy_(grad)


def _what_differs(dtype: torch.dtype) -> list[str]:
    random = torch.Generator().manual_seed(1)
    groups = []
    for which, (_, formula) in enumerate(NAMED[1:], 1):
        params = [nn.Parameter(special(n, dtype, random)) for n in SIZES]
        for p in params:
            p.grad = special(p.numel(), dtype, random)
        try:
            formula([p.detach() for p in params], [p.grad for p in params])  # type: ignore[misc]
        except (RuntimeError, TypeError):
            continue  # no such operator for this dtype
        groups.append({"params": params, "on": False, "which": which})
    assert len(groups) > 300
    optimizer = optfuse.fuse(OnLists(groups))
    found = []
    for group in optimizer.param_groups:
        group["on"] = True
    optimizer.step()
    assert not link_of(optimizer).traced.untraced  # type: ignore[union-attr]
    for group in optimizer.param_groups:
        params = [p.detach() for p in group["params"]]
        name, formula = NAMED[group["which"]]
        wanted = formula(params, [p.grad for p in group["params"]])
        ours = [optimizer.state[p]["made"] for p in group["params"]]
        like_ours = [x.to(dtype).expand(p.shape) for x, p in zip(wanted, params, strict=True)]
        if difference("", ours, like_ours):
            found.append(name)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lists_have_the_bits_of_the_operator(dtype: torch.dtype) -> None:
    assert not _what_differs(dtype)


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_lists_on_other_cpus(capability: str) -> None:
    code = "import folders, test_traced_foreach as t; print([t._what_differs(d) for d in t.DTYPES])"
    said = python_ok(code, ATEN_CPU_CAPABILITY=capability)
    assert said.splitlines()[-1] == str([[]] * len(DTYPES))


class Scales(Base):
    """From a step on that no trial meets, updates are scaled by a list of numbers."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        state["k"] = state.get("k", 0) + 1
        updates = [grad.clone()]
        torch._foreach_mul_(updates, [1.2345 if state["k"] > 50 else 1.0])
        torch._foreach_add_([p], updates, alpha=-group["lr"])


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_list_of_numbers_in_a_late_branch(dtype: torch.dtype, mode: str) -> None:
    def trained(wrap: Callable[[Any], Any]) -> Tensor:
        random = torch.Generator().manual_seed(0)
        p = nn.Parameter(torch.randn(20, 8, generator=random).to(dtype))
        optimizer = wrap(Scales([p], lr=0.1))
        for _ in range(60):
            optimizer.zero_grad()
            p.backward(torch.randn(20, 8, generator=random).to(dtype))
            optimizer.step()
        return p.detach().clone()

    ours = trained(lambda optimizer: optfuse.fuse(optimizer, mode=mode))
    assert torch.equal(ours, trained(lambda optimizer: optimizer))
