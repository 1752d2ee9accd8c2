# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: exceptions on the way."""

import contextlib

import torch
from torch import nn

from programs.deed import BATCH, DIFFERS, EITHER, INDEX, deed
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


@deed(weight=0, turns=1, backward=DIFFERS, kinds=("AdamW", "SGD", "RMSprop", "Lion"))
def look_after_an_exception_in_backward(world):
    """The second layer has its gradients by then."""
    world.optimizer().zero_grad()
    handle = world.model()[0].register_full_backward_pre_hook(fail)
    with contextlib.suppress(Fault):
        world.backward(world.loss(0, 1))
    handle.remove()
    world.see("weights", world.params())
    world.step(0)


@deed(weight=1, optimizer=INDEX, stock=EITHER, kinds=has_closure)
def exception_in_a_closure(world, optimizer):
    world.step(optimizer, fail)
