# SPDX-License-Identifier: BSD-3-Clause
"""The forms of what PyTorch's operators give are remembered, in the whole process. Each class here
is fused twice, or changed after fuse(), so that one of the things on which they depend is another:
a form that is remembered by less than these would be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_traced_calls import OPERATORS
from torch import Tensor
from traced_classes import Base, TrustRatio

import optfuse
from optfuse._link import link_of
from optfuse._traced.without_data import results
from optfuse._trials.compare import difference

Formula = Callable[[Tensor, Tensor, dict[str, Any]], Any]


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    results.cache_clear()
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


def by(formula: Formula, **options: Any) -> type[Base]:
    class ByFormula(Base):
        def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: Any) -> None:
            formula(p, grad, group)

        @classmethod
        def options(cls) -> dict[str, Any]:
            return {"lr": 1e-2, **options}

    return ByFormula


def optimizer_of(
    cls: type[Base], shape: tuple[int, ...] = (4, 6), dtype: torch.dtype = torch.float32
) -> Base:
    random = torch.Generator().manual_seed(0)
    numbers = (torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(3))
    return cls([x.to(dtype).requires_grad_() for x in numbers])


def take(optimizer: Base, seed: int = 1) -> None:
    random = torch.Generator().manual_seed(seed)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.randn(p.shape, generator=random, dtype=torch.float64).to(p.dtype)
    optimizer.step()


def expect_stocks_bits(cls: type[Base], *of_params: Any) -> None:
    stock, ours = optimizer_of(cls, *of_params), optfuse.fuse(optimizer_of(cls, *of_params))
    for step in range(6):
        take(stock, step)
        take(ours, step)
        pairs = (one.param_groups[0]["params"] for one in (ours, stock))
        assert difference("", *map(list, pairs)) is None
    assert not link_of(ours).traced.untraced


# In each of these to() does nothing if the number has the dtype already, and is not recorded.
def shared(p: Tensor, g: Tensor, group: Any) -> None:
    """A whole number is divided, which gives one of the default dtype."""
    share = ((g > 0).sum() / 3).to(p.dtype)
    p.sub_(share * share * share * 0.01)


def counted(p: Tensor, g: Tensor, group: Any) -> None:
    count = ((g > 0).sum() * group["k"] * 1001).to(p.dtype)
    p.sub_(count * count * count * 1e-12)


def asked(p: Tensor, g: Tensor, group: Any) -> None:
    """Twice a whole number is 2, twice True is True."""
    answer = ((g > 0).any() * group["k"]).to(torch.bool)
    p.sub_((answer + answer).to(p.dtype))


def test_the_default_dtype() -> None:
    expect_stocks_bits(by(shared))
    torch.set_default_dtype(torch.float64)
    expect_stocks_bits(by(shared))


@pytest.mark.parametrize(("formula", "numbers"), [(counted, (1.0, 1)), (asked, (True, 1))])
def test_the_type_of_a_number(formula: Formula, numbers: Any) -> None:
    for k in numbers:
        expect_stocks_bits(by(formula, k=k))


@pytest.mark.parametrize("name", ["norm", "sums", "columns", "sort", "flat", "standard deviation"])
def test_shapes(name: str) -> None:
    cls = by(lambda p, g, _: OPERATORS[name](p, g))
    for shape in ((4, 6), (6, 4), (1, 24), (8, 3)):
        expect_stocks_bits(cls, shape)


def rounded(p: Tensor, g: Tensor, group: Any) -> None:
    p.sub_(g.norm().to(torch.float32).to(p.dtype))


def test_dtypes() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        expect_stocks_bits(by(rounded), (4, 6), dtype)


def test_strides() -> None:
    def flat(p: Tensor, g: Tensor, group: Any) -> None:
        turned = (g * 2).T
        p.sub_(turned.T if turned.is_contiguous() else turned.T * group["lr"])

    for turned in (False, True):
        stock, ours = (optimizer_of(by(flat)) for _ in range(2))
        for one in (stock, ours) if turned else ():
            one.param_groups[0]["params"] = [
                p.detach().T.contiguous().T.requires_grad_() for p in one.param_groups[0]["params"]
            ]
        optfuse.fuse(ours)
        for step in range(4):
            for one in (stock, ours):
                random = torch.Generator().manual_seed(step)
                for p in one.param_groups[0]["params"]:
                    p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=random))
                one.step()
        pairs = (one.param_groups[0]["params"] for one in (ours, stock))
        assert difference("", *map(list, pairs)) is None


# Steps that PyTorch refuses without data, if a number or a setting is another one. The numbers are
# not options: with another one fuse()'s trial would come first.
NOW = {"bound": 0.25, "power": 2.0}


def shrunk(p: Tensor, g: Tensor, group: Any) -> None:
    p.sub_(torch.nn.functional.softshrink(g, NOW["bound"]))


def renormed(p: Tensor, g: Tensor, group: Any) -> None:
    p.sub_(g.renorm(NOW["power"], 0, 1.0))


def unpooled(p: Tensor, g: Tensor, group: Any) -> None:
    pooled, where = torch.nn.functional.max_pool2d(g[None, None], 2, return_indices=True)
    p.sub_(torch.nn.functional.max_unpool2d(pooled, where, 2)[0, 0])


@pytest.mark.parametrize(("formula", "name"), [(shrunk, "bound"), (renormed, "power")])
def test_a_number_out_of_range(
    formula: Formula, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, ours = optimizer_of(by(formula)), optfuse.fuse(optimizer_of(by(formula)))
    for one in (stock, ours):
        take(one)
    monkeypatch.setitem(NOW, name, -1.0)
    expect_stocks_error(stock, ours)


def test_deterministic_algorithms() -> None:
    stock, ours = optimizer_of(by(unpooled)), optfuse.fuse(optimizer_of(by(unpooled)))
    for one in (stock, ours):
        take(one)
    optfuse.flush(ours)
    torch.use_deterministic_algorithms(True)
    expect_stocks_error(stock, ours)


def expect_stocks_error(stock: Base, ours: Base) -> None:
    """In step(), before anything is updated."""
    errors = []
    for one in (stock, ours):
        with pytest.raises(RuntimeError) as raised:
            take(one)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]
    pairs = (one.param_groups[0]["params"] for one in (ours, stock))
    assert difference("", *map(list, pairs)) is None


def test_nothing_is_tried_twice() -> None:
    optfuse.fuse(optimizer_of(TrustRatio))
    first = results.cache_info().misses
    assert first
    optfuse.fuse(optimizer_of(TrustRatio))
    assert results.cache_info().misses == first
