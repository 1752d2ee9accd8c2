# SPDX-License-Identifier: BSD-3-Clause
"""Each operator of a traced step() has the bits of PyTorch's, on special numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from traced_classes import Base

import optfuse
from optfuse._link import link_of
from optfuse._trials.compare import difference

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
_ONE = torch.tensor(0.3)
OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "copy": lambda p, g: g.clone(),
    "neg": lambda p, g: -g,
    "abs": lambda p, g: g.abs(),
    "sign": lambda p, g: g.sign(),
    "sgn": lambda p, g: torch.sgn(g),
    "square": lambda p, g: g.square(),
    "power 2": lambda p, g: g**2,
    "sqrt": lambda p, g: g.sqrt(),
    "rsqrt": lambda p, g: g.rsqrt(),
    "reciprocal": lambda p, g: g.reciprocal(),
    "fill": lambda p, g: torch.full_like(p, 0.1),
    "add": lambda p, g: p.add(g, alpha=0.3),
    "sub": lambda p, g: p.sub(g, alpha=0.7),
    "add_number": lambda p, g: g + 0.1,
    "sub_number": lambda p, g: g - 0.1,
    "rsub": lambda p, g: 1.1 - g,
    "rsub alpha": lambda p, g: torch.rsub(g, 0.3, alpha=2),
    "mul": lambda p, g: p * g,
    "mul_number": lambda p, g: p * 0.3,
    "div": lambda p, g: p / g,
    "div_number": lambda p, g: p / 0.001,
    "number_div": lambda p, g: 0.3 / g,
    "addcmul": lambda p, g: p.addcmul(g, g, value=0.3),
    "addcdiv": lambda p, g: p.addcdiv(g, p, value=0.3),
    "lerp near": lambda p, g: p.lerp(g, 0.1),
    "lerp far": lambda p, g: p.lerp(g, 0.9),
    "lerp 1": lambda p, g: p.lerp(g, 1.0),
    "lerp tensor": lambda p, g: p.lerp(g, torch.tensor(0.2, dtype=p.dtype)),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clamp_min": lambda p, g: g.clamp(min=0.1),
    "clamp_max": lambda p, g: g.clamp(max=0.1),
    "clamp both": lambda p, g: g.clamp(-0.1, 0.2),
    "clamp tensors": lambda p, g: g.clamp(-p.abs(), p.abs()),
    "clamp_min tensor": lambda p, g: g.clamp_min(p),
    "gt": lambda p, g: (p > g).to(p.dtype),
    "lt number": lambda p, g: (g < 0.1).to(p.dtype),
    "ge number": lambda p, g: g * (g >= 0.3),
    "eq": lambda p, g: (p == g).to(p.dtype),
    "ne number": lambda p, g: p * (g != 0),
    "where": lambda p, g: torch.where(p > g, p, g),
    "where first": lambda p, g: torch.where(p > g, 0.3, g),
    "where second": lambda p, g: torch.where(p > g, p, 0.3),
    "and": lambda p, g: p * ((p > 0) & (g > 0)),
    "or": lambda p, g: p * ((p > 0) | (g > 0)),
    "not": lambda p, g: p * (~(p > 0)),
    "masked_fill": lambda p, g: g.masked_fill(p > 0, 0.7),
    "isnan": lambda p, g: torch.where(torch.isnan(g), 0.0, g),
    "mul 0-dim": lambda p, g: p * _ONE,
    "mul 0-dim float64": lambda p, g: p.mul(_ONE.double()),
    "add 0-dim": lambda p, g: p.add(_ONE),
    "div 0-dim": lambda p, g: p / _ONE,
    "0-dim div": lambda p, g: _ONE / g,
    "mul, add": lambda p, g: p.mul(0.9).add_(g, alpha=0.1),
    "mul, addcmul": lambda p, g: p.mul(0.9).addcmul_(g, g, value=0.1),
    "div, add": lambda p, g: p.abs().sqrt().div_(0.3).add_(1e-8),
}
# Some of them PyTorch's own operator takes in 16 bits.
POWERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "power 3": lambda p, g: g.pow(3),
    "power -2": lambda p, g: g.pow(-2),
    "power 0.5": lambda p, g: g.pow(0.5),
    "power -0.5": lambda p, g: g.pow(-0.5),
    "power -1": lambda p, g: g.pow(-1),
}


class OneOperator(Base):
    formula: Any = None

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
        p.copy_(type(self).formula(p, grad))


def one_operator(name: str) -> type[OneOperator]:
    formula = staticmethod({**OPERATORS, **POWERS}[name])
    return type("One", (OneOperator,), {"formula": formula})


def special(n: int, dtype: torch.dtype, random: torch.Generator) -> Tensor:
    values = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3e38, 1.0, -1.0])
    which = torch.randint(18, (n,), generator=random)
    return torch.where(which < 9, values.repeat(2)[which], torch.randn(n, generator=random)).to(
        dtype
    )


def pairs(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    for n in (1, 5, 15, 16, 37, 1003, 20_011):
        yield special(n, dtype, random), special(n, dtype, random)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str, dtype: torch.dtype) -> None:
    cls = one_operator(name)
    numbers = list(pairs(dtype))
    params = [nn.Parameter(p.clone()) for p, _ in numbers]
    optimizer = optfuse.fuse(cls(params))
    assert link_of(optimizer).traced is not None
    for param, (_, grad) in zip(params, numbers, strict=True):
        param.grad = grad
    optimizer.step()
    for param, (p, grad) in zip(params, numbers, strict=True):
        assert difference("", param.detach(), OPERATORS.get(name)(p, grad)) is None  # type: ignore[misc]


@pytest.mark.parametrize("name", POWERS)
def test_powers(name: str) -> None:
    """Whatever the length of PyTorch's vectors is here."""
    random = torch.Generator().manual_seed(2)
    for dtype in DTYPES:
        grads = [torch.rand(n, generator=random).to(dtype) for n in (1, 32, 37, 48, 96, 127, 1003)]
        params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
        optimizer = optfuse.fuse(one_operator(name)(params))
        assert link_of(optimizer).traced is not None
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
        for param, grad in zip(params, grads, strict=True):
            assert difference("", param.detach(), POWERS[name](param, grad)) is None
