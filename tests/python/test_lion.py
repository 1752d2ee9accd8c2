# SPDX-License-Identifier: BSD-3-Clause
"""optfuse.optim.Lion: its step() against the paper's formula, and fused against
its step(), by bits."""

import copy
import pickle

import pytest
import torch
from common import assert_same
from torch import nn

import optfuse
from optfuse.optim import Lion

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OPTIONS = (
    {},
    {"weight_decay": 0.1},
    {"betas": (0.0, 0.0), "lr": 0.02},
    {"maximize": True, "weight_decay": 0.01},
    {"lr": torch.tensor(0.003)},
)
SIZES = ((3,), (7, 5), (65, 33), ())


def make_params(dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in SIZES]


def train(optimizer, params, steps=20, seed=1):
    torch.manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        sum((p * torch.randn(p.shape).to(p.dtype)).sum() for p in params).backward()
        optimizer.step()


def test_step_is_the_papers_formula():
    p = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    m, x = torch.zeros(3, dtype=torch.float64), p.detach().clone()
    optimizer = Lion([p], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    for g in ([1.0, -1.0, 0.0], [-9.0, 0.5, 0.0], [-20.0, 3.0, 1e-9]):
        p.grad = torch.tensor(g, dtype=torch.float64)
        optimizer.step()
        c = 0.9 * m + 0.1 * p.grad
        x = x - 0.1 * (torch.sign(c) + 0.5 * x)
        m = 0.99 * m + 0.01 * p.grad
    torch.testing.assert_close(p.detach(), x)
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], m)


@pytest.mark.parametrize("mode", ("forward", "backward"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_fused_has_the_bits_of_step(options, dtype, mode):
    stock, ours = make_params(dtype), make_params(dtype)
    plain, fused = Lion(stock, **options), optfuse.fuse(Lion(ours, **options), mode=mode)
    train(plain, stock)
    train(fused, ours)
    for a, b in zip(stock, ours, strict=True):
        assert_same("parameter", b, a)
        assert_same("exp_avg", fused.state[b]["exp_avg"], plain.state[a]["exp_avg"])


def test_a_fused_one_is_still_a_lion_and_saves_as_one():
    params = make_params()
    fused = optfuse.fuse(Lion(params))
    train(fused, params)
    assert isinstance(fused, Lion) and type(fused).__name__ == "Lion"
    assert type(pickle.loads(pickle.dumps(fused))) is Lion
    twins = make_params()
    plain = Lion(twins)
    plain.load_state_dict(copy.deepcopy(fused.state_dict()))
    assert_same("exp_avg", plain.state[twins[2]]["exp_avg"], fused.state[params[2]]["exp_avg"])


@pytest.mark.parametrize(
    "wrong",
    (
        {"lr": -1.0},
        {"betas": (1.0, 0.5)},
        {"betas": (0.5, -0.1)},
        {"betas": (0.5,)},
        {"betas": (0.5, 0.5, 0.5)},
        {"weight_decay": -1.0},
    ),
)
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="Invalid"):
        Lion(make_params(), **wrong)


def test_a_sparse_gradient_is_refused():
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.ones(4).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        Lion([p]).step()
