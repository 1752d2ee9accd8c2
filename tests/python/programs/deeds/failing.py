# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: exceptions on the way."""

import torch
from torch import nn

from programs.deed import BATCH, EITHER, INDEX, deed
from programs.optimizers import has_closure


class Fault(Exception):
    """The exception of these actions in the middle of a pass."""


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Fault


def fail(*_):
    raise Fault


@deed(weight=3, model=INDEX, layer=INDEX, batch=BATCH, stock=EITHER)
def exception_in_forward(world, model, layer, batch):
    layers = list(world.model(model).children())
    if not layers:
        return
    handle = layers[layer % len(layers)].register_forward_hook(fail)
    try:
        world.see("loss", world.loss(model, batch))
    finally:
        handle.remove()


@deed(model=INDEX, batch=BATCH, backward=EITHER, stock=EITHER)
def exception_before_backward(world, model, batch):
    """At its very start: no gradient is complete."""
    world.backward(FailsInBackward.apply(world.loss(model, batch)))


@deed(model=INDEX, batch=BATCH, backward=EITHER, stock=EITHER)
def exception_in_backward(world, model, batch):
    """Half-way: the loss of the weights themselves has its gradients first."""
    chosen = world.model(model)
    layers = [m for m in chosen.children() if isinstance(m, nn.Linear)]
    if not layers:
        return
    handle = layers[0].register_full_backward_pre_hook(fail)
    try:
        world.backward(world.loss(model, batch))
    finally:
        handle.remove()


@deed(weight=1, optimizer=INDEX, stock=EITHER, kinds=has_closure)
def exception_in_a_closure(world, optimizer):
    world.step(optimizer, fail)
