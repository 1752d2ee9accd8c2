# SPDX-License-Identifier: BSD-3-Clause
"""A step() that branches on a tensor's value runs once for each outcome; the update takes the one
that its data says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from branching_classes import BRANCHING, UNTRACEABLE, ClipsAbove, Lamb, OfElements
from test_traced import MODES, Net, expect_same, fused, train
from torch import Tensor, nn
from torch.optim import Optimizer
from traced_classes import Base, beside_stock

import optfuse
from optfuse._link import link_of
from optfuse._traced.parts import Parts

by_name = {"ids": lambda cls: cls.__name__}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", BRANCHING, **by_name)
def test_training_has_the_bits_of_the_class(cls: type[Optimizer], mode: str) -> None:
    made: list[Optimizer] = []
    expect_same(train(cls, fused(mode, made)), train(cls), mode)
    traced = link_of(made[0]).traced
    assert traced is not None and not traced.untraced


@pytest.mark.parametrize("cls", UNTRACEABLE, **by_name)
def test_what_depends_on_the_outcome_beside_data_is_refused(cls: type[Optimizer]) -> None:
    with pytest.raises(optfuse.Error, match=UNTRACEABLE[cls]):
        optfuse.fuse(cls(Net().parameters()))  # type: ignore[call-arg]


def test_a_tensor_of_the_parameters_shape_is_no_question() -> None:
    with pytest.raises(optfuse.Error, match="branches on a tensor's value"):
        optfuse.fuse(OfElements([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(3))]))


def test_each_outcome_is_taken() -> None:
    """Gradients, weights and updates of zeros, of which Lamb asks, and what is not finite."""
    for values in ([0.0] * 4, [1.0] * 4, [math.nan] * 4, [math.inf] * 4, [1e-30] * 4):
        params = [nn.Parameter(torch.tensor(values)), nn.Parameter(torch.zeros(3, 2))]
        beside_stock(Lamb, params, 3)
        beside_stock(ClipsAbove, params, 3)


def test_operators_of_the_other_outcome_do_not_run() -> None:
    """They could raise."""

    class Inverts(Base):
        def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
            if p.dim() == 2 and torch.linalg.det(grad) != 0:
                grad = torch.linalg.inv(grad)
            p.add_(grad, alpha=-group["lr"])

    params = [nn.Parameter(torch.eye(3)), nn.Parameter(torch.ones(3))]
    optimizer = optfuse.fuse(Inverts(params))
    for grad in (torch.eye(3), torch.zeros(3, 3), 2 * torch.eye(3)):
        params[0].grad, params[1].grad = grad.clone(), torch.ones(3)
        optimizer.step()
    expected = torch.eye(3) - 1e-2 * (torch.eye(3) + 0.5 * torch.eye(3))
    assert torch.allclose(params[0], expected)


def test_explain_shows_both_ways() -> None:
    model = Net()
    optimizer = optfuse.fuse(ClipsAbove(model.parameters()))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    text = optfuse.explain(optimizer)
    lines = text.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("if t"))
    assert lines[begin + 1].startswith("    ") and "else:" in lines
    programs = [c.recorded.program for c in link_of(optimizer).traced.recording.cohorts]  # type: ignore[union-attr]
    assert all(isinstance(program, Parts) for program in programs)


class EndsAtZeros(Base):
    """A loop that ends by a value: of one parameter alone it looks like one that goes on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if self.is_end(p.grad):
                    break
                p.add_(p.grad, alpha=-group["lr"])

    def is_end(self, grad: Tensor) -> bool:
        return bool(grad.norm() == 0)


class EndsAtSmall(EndsAtZeros):
    def is_end(self, grad: Tensor) -> bool:
        return bool(grad.abs().max() < 1e-5)


class EndsAtLarge(EndsAtZeros):
    def is_end(self, grad: Tensor) -> bool:
        return bool(grad.abs().max() > 1e6)


class EndsAtNaN(EndsAtZeros):
    def is_end(self, grad: Tensor) -> bool:
        return bool(grad.isnan().any())


@pytest.mark.parametrize("cls", (EndsAtZeros, EndsAtSmall, EndsAtLarge, EndsAtNaN), **by_name)
def test_a_loop_that_ends_by_a_value_is_refused(cls: type[Optimizer]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(16, 4), nn.Linear(4, 4))
    with pytest.raises(optfuse.Error, match="does not treat parameters independently"):
        optfuse.fuse(cls(model.parameters()))  # type: ignore[call-arg]


def test_a_loop_on_values_that_need_not_end_is_refused() -> None:
    class Clamps(Base):
        def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
            while (grad.abs() > 1).any():
                grad = grad.clamp(-0.5, 0.5)
            p.add_(grad, alpha=-group["lr"])

    with pytest.raises(optfuse.Error, match="branches on more than 4 values"):
        optfuse.fuse(Clamps(Net().parameters()))
