# SPDX-License-Identifier: BSD-3-Clause
"""The forms of what PyTorch's operators give are remembered, in the whole process. Each class here
is fused twice, or goes on, so that one of the things on which they depend is another: a form that
is remembered by less would be wrong."""

import pytest
import torch
from common import assert_same
from style_classes import Base
from test_operators import OTHERS
from torch import nn

import optfuse

MODES = ("forward", "backward")


@pytest.fixture(autouse=True)
def settings_as_they_were():
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


def by(formula, **options):
    class ByFormula(Base):
        def update(self, p, grad, state, group):
            formula(p, grad, group)

        @classmethod
        def options(cls):
            return {"lr": 1e-2, **options}

    return ByFormula


def params_of(shape=(4, 6), dtype=torch.float32):
    random = torch.Generator().manual_seed(0)
    numbers = (torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(3))
    return [nn.Parameter(x.to(dtype)) for x in numbers]


def take(optimizer, seed=1):
    random = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    params = optimizer.param_groups[0]["params"]
    grads = [torch.randn(p.shape, generator=random, dtype=torch.float64) for p in params]
    torch.autograd.backward(
        params, [torch.empty_like(p).copy_(g) for p, g in zip(params, grads, strict=True)]
    )
    optimizer.step()


def pair(cls, mode, *form):
    return cls(params_of(*form)), optfuse.fuse(cls(params_of(*form)), mode)


def expect_stocks_bits(cls, *form, steps=6):
    for mode in MODES:
        stock, ours = pair(cls, mode, *form)
        for step in range(steps):
            take(stock, step)
            take(ours, step)
            assert_same(mode, *(x.param_groups[0]["params"] for x in (ours, stock)))


# to() in each of these does nothing if the number has the dtype already, and is not recorded.
def shared(p, g, group):
    """A whole number is divided, which gives one of the default dtype."""
    share = ((g > 0).sum() / 3).to(p.dtype)
    p.sub_(share * share * share * 0.01)


def counted(p, g, group):
    count = ((g > 0).sum() * group["k"] * 1001).to(p.dtype)
    p.sub_(count * count * count * 1e-12)


def asked(p, g, group):
    """Twice a whole number is 2, twice True is True."""
    answer = ((g > 0).any() * group["k"]).to(torch.bool)
    p.sub_((answer + answer).to(p.dtype))


def rounded(p, g, group):
    p.sub_(g.norm().to(torch.float32).to(p.dtype))


def through(p, g, group):
    """flatten() shows the update itself, or a copy of it."""
    update = g * 1.0
    update.flatten().mul_(0.5)
    update.contiguous().mul_(0.5)
    update.reshape(-1).add_(0.1)
    made = p.new_ones(p.shape)
    made.flatten().mul_(group["lr"])
    p.sub_(update * made)


def test_the_default_dtype():
    expect_stocks_bits(by(shared))
    torch.set_default_dtype(torch.float64)
    expect_stocks_bits(by(shared))


@pytest.mark.parametrize(("formula", "numbers"), [(counted, (1.0, 1)), (asked, (True, 1))])
def test_the_type_of_a_number(formula, numbers):
    for k in numbers:
        expect_stocks_bits(by(formula, k=k))


@pytest.mark.parametrize("name", ["norm", "sums", "columns", "sort", "stacked", "largest of rows"])
def test_shapes(name):
    cls = by(lambda p, g, _: p.copy_(OTHERS[name](p, g)))
    for shape in ((4, 6), (6, 4), (1, 24), (8, 3)):
        expect_stocks_bits(cls, shape)


def test_dtypes():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        expect_stocks_bits(by(rounded), (4, 6), dtype)


# ---- strides


def transposed(x):
    return x.t().contiguous().t()


def plain(x):
    return x


def with_holes(x):
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def channels_last(x):
    return x.to(memory_format=torch.channels_last)


MIXES = {
    "other strides": [((8, 8), transposed)],
    "plain first": [((8, 8), plain), ((8, 8), transposed)],
    "plain last": [((8, 8), transposed), ((8, 8), plain)],
    "other shapes": [((5,), plain), ((6, 3), plain), ((4, 3), transposed), ((2, 3, 4, 5), plain)],
    "an image": [((2, 3, 4, 5), plain), ((2, 3, 4, 5), channels_last)],
    "holes": [((9, 130), with_holes), ((9, 130), plain)],
    "vectors with holes": [((n,), with_holes) for n in (7, 100, 1000)],
}


class OfHalves(Base):
    """In 16 bits PyTorch rounds once more where strides keep it from its vectors."""

    def update(self, p, grad, state, group):
        if not state:
            state["n"], state["sum"] = 0, torch.zeros_like(p)
        state["n"] += 1
        state["sum"].add_(p, alpha=state["n"])
        p.add_(grad, alpha=-group["lr"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("cls", [by(through), OfHalves])
def test_strides(cls, mix, dtype):
    """Those of each parameter, which become others in the middle of training."""

    def trained(mode):
        torch.manual_seed(0)
        params = [nn.Parameter(lay(torch.randn(s).to(dtype))) for s, lay in MIXES[mix]]
        optimizer = cls(params)
        if mode:
            optfuse.fuse(optimizer, mode)
        for step in range(8):
            if step == 4:
                for p, (_, lay) in zip(params, MIXES[mix], strict=True):
                    p.data = p.data.contiguous()
                    p.data = with_holes(p.data) if lay is plain and p.dim() == 2 else p.data
            take(optimizer, step)
            optimizer.param_groups[0]["lr"] *= 0.9
        return params, [optimizer.state[p] for p in params]

    stock = trained(None)
    for mode in MODES:
        assert_same(mode, trained(mode), stock)


# ---- what PyTorch refuses if a number or a setting is another one

NOW = {"bound": 0.25, "power": 2.0}


def shrunk(p, g, group):
    p.sub_(nn.functional.softshrink(g, NOW["bound"]))


def renormed(p, g, group):
    p.sub_(g.renorm(NOW["power"], 0, 1.0))


def unpooled(p, g, group):
    pooled, where = nn.functional.max_pool2d(g[None, None], 2, return_indices=True)
    p.sub_(nn.functional.max_unpool2d(pooled, where, 2)[0, 0])


@pytest.mark.parametrize(("formula", "name"), [(shrunk, "bound"), (renormed, "power")])
def test_a_number_out_of_range(formula, name, monkeypatch):
    stock, ours = pair(by(formula), "forward")
    for step in range(3):
        take(stock, step), take(ours, step)
    monkeypatch.setitem(NOW, name, -1.0)
    expect_stocks_error(stock, ours)


def test_deterministic_algorithms():
    stock, ours = pair(by(unpooled), "forward")
    for step in range(3):
        take(stock, step), take(ours, step)
    torch.use_deterministic_algorithms(True)
    expect_stocks_error(stock, ours)


def expect_stocks_error(stock, ours):
    errors = []
    for one in (stock, ours):
        with pytest.raises(RuntimeError) as raised:
            take(one)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]
    assert_same("params", *(x.param_groups[0]["params"] for x in (ours, stock)))
