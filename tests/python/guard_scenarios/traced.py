# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers whose step() is traced."""

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
