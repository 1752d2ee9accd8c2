# SPDX-License-Identifier: BSD-3-Clause
"""Pipelines of torch.distributed split backward by themselves (zero-bubble schedules). On one
stage their gradients, ours and stock's have the same bits."""

import copy

import pytest
import torch
from common import assert_same
from reorder_scripts import mlp, x_of
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import optfuse


def conv():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 6, 3))


STAGES = {
    "mlp": (mlp, lambda i: x_of(i)),
    "conv": (conv, lambda i: x_of(i, 4, 48).view(4, 1, 6, 8)),
}


def by_pipelining(model, x):
    loss = model(x).square().mean()
    (dx,), groups = stage_backward_input([loss], None, [x], model.parameters())
    stage_backward_weight(model.parameters(), groups)
    return dx


def by_reordering(model, x):
    with optfuse.reorder(model, "last"):
        model(x).square().mean().backward()
    return x.grad


def by_stock(model, x):
    model(x).square().mean().backward()
    return x.grad


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_has_the_gradients_of_the_zero_bubble_split(stage):
    torch.manual_seed(0)
    build, batch = STAGES[stage]
    found = {}
    model = build()
    for way in (by_stock, by_pipelining, by_reordering):
        own = copy.deepcopy(model)
        dx = way(own, batch(0).requires_grad_())
        found[way.__name__] = [dx, *(p.grad for p in own.parameters())]
    for way in ("by_pipelining", "by_reordering"):
        assert_same(way, found[way], found["by_stock"])


def test_a_reordered_stage_can_be_split():
    """stage_backward_input() walks the graph, ours too."""
    torch.manual_seed(0)
    model = mlp()
    x = x_of(0).requires_grad_()
    by_stock(model, x)
    stock = [x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    with optfuse.reorder(model, "last"):
        dx = by_pipelining(model, x_of(0).requires_grad_())
    assert_same("both", [dx, *(p.grad for p in model.parameters())], stock)
