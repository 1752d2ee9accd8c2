# SPDX-License-Identifier: BSD-3-Clause
"""Trainers put step() and step_parameter() into one optimizer, not into its class: it is fused as
what it is then."""

import copy

import pytest
import torch
from test_step_parameter import MODES
from torch import nn

import optfuse


@torch.no_grad()
def step_parameter(self, p, group, i):
    if p.grad is not None:
        state = self.state[p]
        if not state:
            state["m"] = torch.zeros_like(p)
        state["m"].lerp_(p.grad, 0.1)
        p.add_(state["m"].sign(), alpha=-group["lr"])


@torch.no_grad()
def step(self, closure=None):
    for group in self.param_groups:
        for i, p in enumerate(group["params"]):
            self.step_parameter(p, group, i)


def patched(params):
    opt = torch.optim.AdamW(params, lr=1e-2)
    opt.step_parameter = step_parameter.__get__(opt)
    opt.step = step.__get__(opt)
    return opt


def train(model, opt, scheduled=False):
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9) if scheduled else None
    g = torch.Generator().manual_seed(1)
    for _ in range(5):
        model(torch.randn(4, 8, generator=g)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return [*model.parameters(), *(opt.state[p]["m"] for p in model.parameters())]


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=["forward", "backward", "final"])
def test_its_bits_are_those_of_the_patched_object(mode, scheduled):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    other = copy.deepcopy(model)
    expected = train(other, patched(other.parameters()), scheduled)
    opt = optfuse.fuse(patched(model.parameters()), mode)
    assert all(map(torch.equal, train(model, opt, scheduled), expected))
    assert "replaced on this object" in str(optfuse.summary(opt))


@pytest.mark.parametrize("mode", MODES, ids=["forward", "backward", "final"])
def test_a_scheduler_that_has_wrapped_it(mode):
    model = nn.Linear(8, 8)
    other = copy.deepcopy(model)
    opt, stock = patched(model.parameters()), patched(other.parameters())
    for one in (opt, stock):
        torch.optim.lr_scheduler.ExponentialLR(one, 0.9)
    expected = train(other, stock)
    assert all(map(torch.equal, train(model, optfuse.fuse(opt, mode)), expected))


@pytest.mark.parametrize("mode", MODES, ids=["forward", "backward", "final"])
def test_unfuse_gives_its_methods_back(mode):
    model = nn.Linear(8, 8)
    opt = patched(model.parameters())
    before = opt.step, opt.step_parameter
    optfuse.unfuse(optfuse.fuse(opt, mode))
    assert (opt.step, opt.step_parameter) == before


def test_patched_after_fuse_it_is_refused_where_updates_have_another_formula():
    model = nn.Linear(8, 8)
    opt = optfuse.fuse(torch.optim.AdamW(model.parameters()), optfuse.Backward(final=True))
    opt.step = step.__get__(opt)
    with pytest.raises(optfuse.Error, match="step.. was replaced"):
        model(torch.ones(1, 8)).sum().backward()
