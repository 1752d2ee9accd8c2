# SPDX-License-Identifier: BSD-3-Clause
"""Up to eight state tensors, of the parameter's shape or of shapes that broadcast to it, in the
styles of COCOB, CAME, SM3 and Adafactor with a first moment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_traced import MODES, Net, expect_same, fused, train
from torch import Tensor, nn
from torch.optim import Optimizer
from traced_classes import Base, NineStates, beside_stock

import optfuse
from optfuse._link import link_of
from optfuse._traced.program import MOST_STATE, Program


class Cocob(Base):
    """Five tensors like the parameter, elementwise."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if not state:
            for name in ("gradients", "reward", "theta", "initial"):
                state[name] = torch.zeros_like(p)
            state["largest"] = torch.full_like(p, 1e-8)
            state["initial"].copy_(p)
        largest = torch.maximum(state["largest"], grad.abs())
        state["gradients"].add_(grad.abs())
        state["reward"].add_(grad * (p - state["initial"])).clamp_(min=0)
        state["theta"].sub_(grad)
        scale = largest * torch.maximum(state["gradients"] + largest, 100 * largest)
        p.copy_(state["initial"] + state["theta"] / scale * (largest + state["reward"]))
        state["largest"] = largest


def rms(x: Tensor) -> Tensor:
    return x.norm(2) / x.numel() ** 0.5


def of_rows_and_columns(rows: Tensor, columns: Tensor) -> Tensor:
    share = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
    return torch.mul(share, columns.unsqueeze(-2).rsqrt())


class Came(Base):
    """Rows and columns of two squares, where there are two dimensions, a moment and a number."""

    def factored(self, state: Any, name: str, p: Tensor, square: Tensor, decay: float) -> Tensor:
        if p.dim() < 2:
            whole = state.setdefault(name, torch.zeros_like(p))
            return whole.mul_(decay).add_(square, alpha=1 - decay).rsqrt()
        if name + "_row" not in state:
            state[name + "_row"] = torch.zeros(p.shape[:-1]).type_as(p)
            state[name + "_col"] = torch.zeros(p.shape[:-2] + p.shape[-1:]).type_as(p)
        rows, columns = state[name + "_row"], state[name + "_col"]
        rows.mul_(decay).add_(square.mean(dim=-1), alpha=1 - decay)
        columns.mul_(decay).add_(square.mean(dim=-2), alpha=1 - decay)
        return of_rows_and_columns(rows, columns)

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if not state:
            state["step"], state["RMS"] = 0, 0
            state["exp_avg"] = torch.zeros_like(p)
        state["step"] += 1
        state["RMS"] = rms(p)
        update = self.factored(state, "exp_avg_sq", p, grad**2 + 1e-30, 0.999).mul_(grad)
        update.div_(rms(update).clamp_(min=1.0))
        state["exp_avg"].mul_(0.9).add_(update, alpha=0.1)
        surprise = (update - state["exp_avg"]) ** 2 + 1e-16
        update = self.factored(state, "exp_avg_res", p, surprise, 0.99).mul_(state["exp_avg"])
        p.add_(-update.mul_(group["lr"]))


class Sm3(Base):
    """A momentum and a number for each place along each dimension: five tensors of a convolution in
    two dimensions."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(p)
            for i in range(p.dim()):
                shape = [n if k == i else 1 for k, n in enumerate(p.shape)]
                state[f"cover_{i}"] = torch.zeros(shape, dtype=p.dtype)
        covers = [state[f"cover_{i}"] for i in range(p.dim())]
        square = covers[0]
        for cover in covers[1:]:
            square = torch.min(square, cover)
        square = square + grad * grad
        for i, cover in enumerate(covers):
            others = [k for k in range(p.dim()) if k != i]
            cover.copy_(square.amax(dim=others, keepdim=True) if others else square)
        step = grad / (square + 1e-30).sqrt()
        state["momentum"].mul_(0.9).add_(step, alpha=0.1)
        p.add_(state["momentum"], alpha=-group["lr"])


class FactoredWithMoment(Base):
    """As Adafactor with beta1."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        if not state:
            state["step"], state["RMS"] = 0, 0
            state["exp_avg"] = torch.zeros_like(p)
            if p.dim() > 1:
                state["exp_avg_sq_row"] = torch.zeros(p.shape[:-1]).type_as(p)
                state["exp_avg_sq_col"] = torch.zeros(p.shape[:-2] + p.shape[-1:]).type_as(p)
            else:
                state["exp_avg_sq"] = torch.zeros_like(p)
        state["step"] += 1
        state["RMS"] = rms(p)
        decay = 1.0 - state["step"] ** -0.8
        square = grad**2 + 1e-30
        if p.dim() > 1:
            rows, columns = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
            rows.mul_(decay).add_(square.mean(dim=-1), alpha=1 - decay)
            columns.mul_(decay).add_(square.mean(dim=-2), alpha=1 - decay)
            update = of_rows_and_columns(rows, columns).mul_(grad)
        else:
            update = state["exp_avg_sq"].mul_(decay).add_(square, alpha=1 - decay).rsqrt() * grad
        update.div_(rms(update).clamp_(min=1.0)).mul_(group["lr"])
        state["exp_avg"].mul_(0.9).add_(update, alpha=0.1)
        p.add_(-state["exp_avg"])


MANY = [Cocob, Came, Sm3, FactoredWithMoment]
by_name = {"ids": lambda cls: cls.__name__}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", MANY, **by_name)
def test_training_has_the_bits_of_the_class(cls: type[Optimizer], mode: str) -> None:
    made: list[Optimizer] = []
    expect_same(train(cls, fused(mode, made)), train(cls), mode)
    traced = link_of(made[0]).traced
    assert traced is not None and not traced.untraced


@pytest.mark.parametrize("cls", MANY, **by_name)
def test_convolutions_in_two_dimensions(cls: type[Optimizer]) -> None:
    conv = nn.Conv2d(5, 7, 3)
    optimizer = beside_stock(cls, list(conv.parameters()), 12)
    tensors = [x for x in optimizer.state[conv.weight].values() if isinstance(x, Tensor)]
    assert len(tensors) > 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    beside_stock(Cocob, [nn.Parameter(torch.randn(6, 700).to(dtype))], 8)


def test_elementwise_rules_stay_one_program() -> None:
    p = nn.Parameter(torch.randn(100))
    optimizer = beside_stock(Cocob, [p], 3)
    (cohort,) = link_of(optimizer).traced.recording.cohorts  # type: ignore[union-attr]
    assert cohort.recorded is not None and isinstance(cohort.recorded.program, Program)


def test_nine_are_too_many() -> None:
    assert MOST_STATE == 8
    with pytest.raises(optfuse.Error, match="more than 8 state tensors"):
        optfuse.fuse(NineStates(Net().parameters()))  # type: ignore[call-arg]
