# SPDX-License-Identifier: BSD-3-Clause
"""Other objects in param_groups and state from one step to the next, equal to those
before or not: each step takes what is there."""

import pytest
import torch
from common import adamw, everything, net, same, train
from torch import nn

STEPS = 6


both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))


@both_modes
def test_options_that_a_failed_step_has_told_are_told_again(mode):
    """The first group's rate is told, the second's refused; then both are as before."""

    def script(wrap):
        model = nn.Sequential(net(), nn.Linear(3, 3))
        groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
        optimizer = wrap(adamw(groups))
        for i in range(STEPS):
            train(model, optimizer, i)
            optimizer.zero_grad()
            if wrap.fused and i in (1, 3):
                rates = [group["lr"] for group in optimizer.param_groups]
                optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.5, None
                with pytest.raises((TypeError, RuntimeError)):
                    train(model, optimizer, i)
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate
                for p in model.parameters():
                    p.grad = None
        yield from everything(model, optimizer)

    same(script, mode)


@both_modes
@pytest.mark.parametrize("what", ("rate", "group"))
def test_changes_inside_a_closure(what, mode):
    if mode == "backward" and what == "rate":
        pytest.skip("backward fusion refuses it: it has updated with the old one")

    def script(wrap):
        model, late = net(), nn.Linear(3, 3)
        optimizer = wrap(adamw(model.parameters()))

        def closure():
            optimizer.zero_grad()
            loss = late(model(torch.ones(2, 6))).square().mean()
            if what == "group" and len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": list(late.parameters()), "lr": 0.2})
            loss.backward()
            if what == "rate":
                optimizer.param_groups[0]["lr"] *= 0.7
            return loss

        for _ in range(STEPS):
            yield "loss", optimizer.step(closure)
        yield from everything(nn.Sequential(model, late), optimizer)

    same(script, mode)
