# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: what happens to gradients in zero_grad() and behind it."""

import torch
from torch import nn

import optfuse
from programs.deed import BEFORE_STEP, consumed, deed, raises


@deed(BEFORE_STEP, weight=0, kinds=("AdamW",), backward=raises("step()"))
def zero_the_optimizer_before_step(world):
    world.optimizer().zero_grad()


@deed(weight=0, backward=consumed("already applied"))
def write_to_a_gradient_that_was_dropped(world):
    kept = world.grad()
    world.optimizer().zero_grad()
    world.see("gradients", [p.grad for p in world.params()])
    kept.mul_(2)


@deed(weight=0)
def parameter_that_was_added_by_hand(world):
    late = nn.Parameter(torch.ones(3, 2))
    world.extra.append(late)
    world.optimizer().param_groups[0]["params"].append(late)
    late.grad = torch.ones_like(late)
    world.optimizer().zero_grad()
    world.see("gradients", [p.grad is None for p in world.params()])


class Ends:
    """Does something when it dies."""

    def __init__(self, do):
        self.do = do

    def __del__(self):
        self.do()


def unfuses(world):
    if world.fused:
        optfuse.unfuse(world.optimizer())


def adds(world):
    late = nn.Parameter(torch.ones(3, 3))
    world.extra.append(late)
    world.optimizer().add_param_group({"params": [late]})


@deed(weight=0, kinds=("AdamW", "SGD"), way=(unfuses, adds), turns=1)
def gradient_whose_end_changes_the_optimizer(world, way):
    """Nothing is lost; backward mode keeps used gradients for the next time."""
    world.launch()
    if world.mode != "backward":
        world.grad().end = Ends(lambda: way(world))
    world.optimizer().zero_grad()
    if world.mode == "backward":
        way(world)
    world.see("gradients", [p.grad for p in world.params()])
    world.see("groups", len(world.optimizer().param_groups))
    world.train()
    if world.fused and way is unfuses:
        world.wrap(world.optimizer())


class Noting(nn.Parameter):
    """Has a `grad` of its own."""

    dropped = 0

    @property
    def grad(self):
        return torch.Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, value):
        Noting.dropped += value is None
        torch.Tensor.grad.__set__(self, value)


@deed("alone")
def parameter_of_a_class_with_a_grad_of_its_own(world):
    p, Noting.dropped = Noting(torch.ones(3)), 0
    optimizer = world.wrap(torch.optim.AdamW([p], fused=True))
    for _ in range(2):
        p.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    world.see("dropped", Noting.dropped)
    world.see("weight", p.detach().as_subclass(torch.Tensor))
