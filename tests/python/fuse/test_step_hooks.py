# SPDX-License-Identifier: BSD-3-Clause
"""Hooks of a fused optimizer are called when stock calls them, and may change what step() uses."""

import pytest
import torch
from common import adamw, everything, loss_of, net, same, sgd, train
from scripts import trained
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import optfuse

STEPS = 6
both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))


@both_modes
def test_hooks_of_the_optimizer(mode):
    def script(wrap):
        model = net()
        optimizer = adamw(model.parameters())
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before step, from before fuse"))
        optimizer = wrap(optimizer)
        optimizer.register_step_pre_hook(lambda *_: seen.append("before step"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after step"))
        optimizer.register_state_dict_pre_hook(lambda *_: seen.append("before state_dict"))
        optimizer.register_state_dict_post_hook(lambda *_: seen.append("after state_dict"))
        optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("before load"))
        optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("after load"))
        everyone = register_optimizer_step_post_hook(lambda *_: seen.append("after any step"))
        for i in range(STEPS):
            train(model, optimizer, i)
        everyone.remove()
        optimizer.load_state_dict(optimizer.state_dict())
        yield "calls", seen
        yield from everything(model, optimizer)

    same(script, mode)


def test_a_hook_before_step_that_changes_gradients():
    def halve(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)

    def start(wrap):
        model = net()
        optimizer = wrap(sgd(model.parameters()))
        optimizer.register_step_pre_hook(halve)
        return model, optimizer

    same(trained(start=start))


@both_modes
def test_a_hook_before_step_that_makes_the_state(mode):
    """It is called before stock makes any."""

    def start(wrap):
        model = net()
        optimizer = adamw(model.parameters())
        optimizer.register_step_pre_hook(make_missing_state)
        return model, wrap(optimizer)

    same(trained(start=start), mode)


def make_missing_state(optimizer, args, kwargs):
    for p in optimizer.param_groups[0]["params"]:
        if not optimizer.state[p]:
            averages = {k: torch.full_like(p, 0.25) for k in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.tensor(2.0), **averages}


@both_modes
def test_such_a_hook_may_come_when_others_have_state(mode):
    """A layer without a gradient has none until then."""

    def script(wrap):
        first, second = net(), nn.Linear(3, 3)
        optimizer = wrap(adamw([*first.parameters(), *second.parameters()]))
        for i in range(6):
            if i == 3:
                optimizer.register_step_pre_hook(make_missing_state)
            optimizer.zero_grad()
            loss = loss_of(first, i)
            if i >= 3:
                loss = loss + second(torch.ones(2, 3)).square().sum()
            loss.backward()
            optimizer.step()
            yield "weights", [*first.parameters(), *second.parameters()]

    same(script, mode)


def test_hooks_of_ours_leave_no_update_to_step():
    model = net()
    reordering = optfuse.reorder(model, "last")
    optimizer = optfuse.fuse(adamw(model.parameters()), "backward")
    loss_of(model, 0).backward()
    assert optfuse.summary(optimizer).created == len(list(model.parameters()))
    optimizer.step()
    reordering.remove()
