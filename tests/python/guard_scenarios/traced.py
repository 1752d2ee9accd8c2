# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers whose step() is traced."""

import math
from typing import Any
from unittest import mock

import torch
from common import net
from torch import Tensor, nn
from traced_classes import Base

import optfuse
from guard_scenarios.registry import Pair, guards, must_raise
from optfuse._traced import operands, operators
from optfuse._traced.standin import Standin


class ByType(Base):
    """Takes a tensor that is none of PyTorch's own for something else."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        is_own = type(p).__module__.startswith("torch")
        p.add_(grad, alpha=-group["lr"] * (1 if is_own else 2))


@guards("traced_bits")
def a_step_that_is_another_one_without_data_is_refused():
    optimizer = ByType(net().parameters())
    must_raise(lambda: optfuse.fuse(optimizer), "fusing a class that sees through stand-ins")


class LateNumber(Base):
    """From a step on that no trial meets, a number of the state is an operand."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if not state:
            state["n"], state["s"] = 0, grad.new_ones(())
        state["n"] += 1
        p.add_(grad / (1 + grad.norm()), alpha=-group["lr"])
        if state["n"] > 50:
            p.mul_(state["s"])


@guards("elements")
def a_number_that_the_recorder_takes_for_a_tensor_is_not_read_beyond_its_end():
    pair = Pair(make=LateNumber)
    for i in range(50):
        pair.train(i)
    with (
        mock.patch.object(operators, "is_operand", lambda x: isinstance(x, Standin)),
        mock.patch.object(operands, "in_room", lambda x: None),
    ):
        for i in range(50, 53):
            pair.train(i)
        pair.assert_same()


class MyParameter(nn.Parameter):
    pass


class ByClass(Base):
    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        p.add_(grad, alpha=-group["lr"] * (2 if type(p) is MyParameter else 1))


@guards("looks")
def a_step_that_may_see_the_class_of_a_parameter_is_refused():
    optimizer = ByClass([MyParameter(torch.ones(9))])
    must_raise(lambda: optfuse.fuse(optimizer), "fusing a class that knows parameters by theirs")


class LateOperand(Base):
    """From a step on that no trial meets, another tensor is added."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if not state:
            state["n"], state["m"] = 0, torch.zeros_like(p)
        state["n"] += 1
        state["m"].mul_(0.5).add_(grad)
        p.add_(grad if state["n"] < 50 else state["m"], alpha=-group["lr"])


@guards("replay")
def a_step_with_another_operand_is_not_taken_for_the_one_before():
    pair = Pair(make=LateOperand)
    for i in range(55):
        pair.train(i)
    pair.assert_same()


# The look at the class's code takes it that nobody puts anything into Python's modules.
_kept: dict[str, Tensor] = {}
vars(math)["kept"] = _kept


class KeepsOne(Base):
    """One step keeps the gradient where nobody looks, and the next one uses it."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        state["n"] = state.get("n", 0) + 1
        if state["n"] == 50:
            math.kept[group["who"]] = grad  # type: ignore[attr-defined]
        source = math.kept[group["who"]] if state["n"] == 51 else grad  # type: ignore[attr-defined]
        p.add_(source, alpha=-group["lr"])


@guards("replay_kept")
def a_tensor_without_data_that_a_step_keeps_is_not_played_again():
    values, ends = torch.ones(9), []
    for who in ("stock", "fused"):
        p = nn.Parameter(values.clone())
        optimizer = KeepsOne([p], who=who)
        if who == "fused":
            optfuse.fuse(optimizer)
        torch.manual_seed(0)
        for _ in range(55):
            p.grad = torch.randn(9)
            optimizer.step()
        ends.append(p.detach().clone())
    assert torch.equal(*ends), "a step used this step's gradient for the one that it had kept"
