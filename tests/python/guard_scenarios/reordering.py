# SPDX-License-Identifier: BSD-3-Clause
"""Guards of backward passes in another order."""

import contextlib

import torch
from common import assert_same, batch, net
from reorder_scripts import order_of_backward
from torch import nn

import optfuse
from guard_scenarios.registry import guards, must_raise


@guards("order")
def a_backward_pass_runs_in_the_order_of_its_schedule():
    model = net()
    with optfuse.reorder(model, "reverse_first", k=2):
        found = order_of_backward(model, batch(0)[0])
    wanted = ["dX of 4", "dW of 4", "dX of 2", "dX of 0", "dW of 0", "dW of 2"]
    assert found == wanted, f"{found}"


@guards("hand_on")
def every_weight_gets_its_gradient():
    torch.manual_seed(0)
    ours, theirs = net(), net()
    ours.load_state_dict(theirs.state_dict())
    with optfuse.reorder(ours, "last"):
        for model in (ours, theirs):
            model(batch(0)[0]).sum().backward()
    missing = [name for name, p in ours.named_parameters() if p.grad is None]
    assert not missing, f"no gradients: {missing}"
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert_same(name, a.grad, b.grad)


@guards("task_version")
def a_gradient_that_changes_while_dw_waits_is_refused():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    kept = []
    with optfuse.reorder(model, "last"):
        hidden = model[:2](batch(0)[0])
        y = model[2:](hidden)
        y.register_hook(kept.append)
        hidden.register_hook(lambda g: kept.append(kept[0].mul_(2)))
        must_raise(y.square().sum().backward, "dY that was changed before its dW")


@guards("budget")
def what_waits_in_a_pass_that_failed_counts():
    def fail(gradient):
        raise ValueError("in the middle of backward")

    x = batch(0)[0]
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    memory = 2 * 2 * x.nbytes  # two layers' x and dY
    with optfuse.reorder(model, "budget", memory=memory) as reordering:
        first = model[:2](x)
        first.register_hook(fail)
        failing = model[2:](first).sum()
        with contextlib.suppress(ValueError):
            failing.backward()
        if reordering.held_bytes[0] != memory:
            raise RuntimeError("nothing waits: the scenario would prove nothing")
        model(x).sum().backward()
        assert reordering.held_bytes[1] <= memory, f"{reordering.held_bytes} of {memory}"
