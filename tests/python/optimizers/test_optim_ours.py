# SPDX-License-Identifier: BSD-3-Clause
"""The optimizers of optfuse.optim: each one's step() against the paper's formula, and
fused against its step(), by bits."""

import copy
import pickle

import pytest
import torch
from common import assert_same
from optim_entries import OURS
from torch import nn

import optfuse
from optfuse.optim import CLASSES

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = ((3,), (7, 5), (65, 33), ())
CASES = [
    (cls, options)
    for cls in CLASSES
    for options in (*OURS[cls.__name__].options, {"lr": torch.tensor(0.003)})
]
WRONG = [(cls, options) for cls in CLASSES for options in OURS[cls.__name__].invalid]
each_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def make_params(dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in SIZES]


def train(optimizer, params, steps=20, seed=1, passes=1, clip=None):
    torch.manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(passes):
            sum((p * torch.randn(p.shape).to(p.dtype)).sum() for p in params).backward()
        if clip is not None:
            clip(params, 0.5)
        optimizer.step()


def assert_same_training(fused, ours, plain, stock):
    for a, b in zip(stock, ours, strict=True):
        assert_same("parameter", b, a)
        assert_same("state", dict(fused.state[b]), dict(plain.state[a]))


@each_class
def test_step_is_the_papers_formula(cls):
    p = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    start, entry = p.detach().clone(), OURS[cls.__name__]
    optimizer = cls([p], lr=0.1, **entry.paper)
    gradients = []
    for g in ([1.0, -1.0, 0.0], [-9.0, 0.5, 0.0], [-20.0, 3.0, 1e-9]):
        p.grad = torch.tensor(g, dtype=torch.float64)
        gradients.append(p.grad.clone())
        optimizer.step()
        torch.testing.assert_close(p.detach(), entry.formula(start, gradients, 0.1, **entry.paper))


@pytest.mark.parametrize("cls, options", CASES)
def test_gradients_that_are_clipped_or_accumulated_have_the_bits_of_step(cls, options):
    counted = optfuse.Backward(accumulate=3)
    for clipped, mode in ((True, "forward"), (False, "forward"), (False, counted)):
        stock, ours = make_params(), make_params()
        plain = cls(stock, **options)
        fused = optfuse.fuse(cls(ours, **options), mode)
        clips = (
            (torch.nn.utils.clip_grad_norm_, optfuse.clip_grad_norm_) if clipped else (None,) * 2
        )
        for optimizer, params, clip in ((plain, stock, clips[0]), (fused, ours, clips[1])):
            train(optimizer, params, 6, passes=1 if clipped else 3, clip=clip)
        assert_same_training(fused, ours, plain, stock)


@each_class
def test_a_fused_one_is_still_of_its_class_and_saves_as_one(cls):
    params = make_params()
    fused = optfuse.fuse(cls(params))
    train(fused, params)
    assert isinstance(fused, cls) and type(fused).__name__ == cls.__name__
    assert type(pickle.loads(pickle.dumps(fused))) is cls
    twins = make_params()
    plain = cls(twins)
    plain.load_state_dict(copy.deepcopy(fused.state_dict()))
    assert_same("state", dict(plain.state[twins[2]]), dict(fused.state[params[2]]))


@pytest.mark.parametrize("cls, wrong", WRONG)
def test_numbers_out_of_range_are_refused(cls, wrong):
    with pytest.raises(ValueError, match="Invalid"):
        cls(make_params(), **wrong)


@each_class
def test_a_sparse_gradient_is_refused(cls):
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.ones(4).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        cls([p]).step()
