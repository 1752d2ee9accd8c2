# SPDX-License-Identifier: BSD-3-Clause
"""Deeds of backward passes in another order."""

import contextlib

from reorder_scripts import order_of_backward
from torch import nn

import optfuse
from programs.deed import ALONE, deed, raises
from programs.models import rows

WANTED = ["dX of 4", "dW of 4", "dX of 2", "dX of 0", "dW of 0", "dW of 2"]


def in_order(world, model, *order, **options):
    return optfuse.reorder(model, *order, **options) if world.fused else contextlib.nullcontext()


def layers(n):
    return nn.Sequential(*(part for _ in range(n) for part in (nn.Linear(4, 4), nn.Tanh())))[:-1]


@deed(ALONE, fault="order", proves=False)
def look_at_the_order_of_backward(world):
    model = layers(3)
    with in_order(world, model, "reverse_first", k=2):
        found = order_of_backward(model, rows(0)) if world.fused else WANTED
    world.see("order", found)


@deed(ALONE, fault="hand_on", proves=False)
def gradients_in_another_order(world):
    model = layers(3)
    with in_order(world, model, "last"):
        model(rows(0)).sum().backward()
    world.see("gradients", [p.grad for p in model.parameters()])


@deed(ALONE, fault="task_version", forward=raises(), backward=raises(), proves=False)
def gradient_that_changes_while_dw_waits(world):
    model, kept = layers(2), []
    with in_order(world, model, "last"):
        hidden = model[:2](rows(0))
        y = model[2:](hidden)
        y.register_hook(kept.append)
        hidden.register_hook(lambda g: kept.append(kept[0].mul_(2)))
        y.square().sum().backward()
    world.see("gradients", [p.grad for p in model.parameters()])


@deed(ALONE, fault="budget", proves=False)
def pass_that_fails_while_dw_waits(world):
    """The budget counts what waits there."""

    def fail(gradient):
        raise ValueError("in the middle of backward")

    x = rows(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    memory = 2 * 2 * x.nbytes  # two layers' x and dY
    with in_order(world, model, "budget", memory=memory) as reordering:
        first = model[:2](x)
        first.register_hook(fail)
        failing = model[2:](first).sum()
        with contextlib.suppress(ValueError):
            failing.backward()
        model(x).sum().backward()
        held = reordering.held_bytes if world.fused else [memory, memory]
    world.see("it waits", held[0] == memory)
    world.see("it is within the budget", held[1] <= memory)
