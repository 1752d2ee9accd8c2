# SPDX-License-Identifier: BSD-3-Clause
"""The optimizers of optfuse.optim: each one's step() against the paper's formula. Fused they have
its bits: test_optim_db.py, programs/deeds/classes.py."""

import copy
import pickle

import pytest
import torch
from common import assert_same
from optim_entries import OURS
from torch import nn

import optfuse
from optfuse.optim import CLASSES

WRONG = [(cls, options) for cls in CLASSES for options in OURS[cls.__name__].invalid]
each_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def make_params():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size)) for size in ((3,), (7, 5), ())]


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


@each_class
def test_a_fused_one_is_still_of_its_class_and_saves_as_one(cls):
    params = make_params()
    fused = optfuse.fuse(cls(params))
    for _ in range(3):
        fused.zero_grad()
        sum(p.square().sum() for p in params).backward()
        fused.step()
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
