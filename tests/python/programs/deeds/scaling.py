# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: iterations scaled by torch.amp.GradScaler, some of which overflow; unscaling and clipping
are folded into the updates, or not."""

import math

import torch
from torch import nn

import optfuse
from programs.deed import deed, raises


def clip(world, *arguments, **options):
    world.see("norm", optfuse.clip_grad_norm_(world.params(), *arguments, **options))


def clip_three_times(world):
    clip(world, 0.05)
    clip(world, 0.02)
    world.see("norm", optfuse.clip_grad_norm_(world.model()[0].parameters(), 0.005))


def clip_by_both(world):
    clip(world, 0.05)
    world.see("norm", nn.utils.clip_grad_norm_(world.params(), 0.002))


def look(world):
    world.see("gradients", [p.grad for p in world.params()])


def look_and_clip(world):
    clip(world, 0.05)
    look(world)


def add_and_clip(world):
    """Adds to gradients that are unscaled."""
    world.backward(world.loss(0, 9))
    clip(world, 0.05)


ACTS = {
    "clip": lambda world: clip(world, 0.05),
    "nothing": lambda world: None,
    **{
        f"clip by a norm of {order}": lambda world, order=order: clip(world, 0.05, order)
        for order in (1.0, math.inf, 3.0)
    },
    "clip one by one": lambda world: clip(world, 0.05, foreach=False),
    **{
        act.__name__: act
        for act in (clip_three_times, clip_by_both, look, look_and_clip, add_and_clip)
    },
}
SCALES = (65536.0, 1.0, 3.0, 0.1, 1e30, 1e-30, 7e4)
SCALED = {
    "scale": SCALES,
    "act": ACTS,
    "overflow": (math.inf, math.nan, 1.0),
    "unscales": (True, False),
    "backward": raises("scaled by GradScaler.scale()", "unscaled before the update"),
    "proves": False,
}
OF_ONE_SCALE = {**SCALED, "scale": SCALES[:1]}


def scaled_iterations(world, scale, act, overflow, unscales):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    for i in range(4):
        for optimizer in world.optimizers:
            optimizer.zero_grad()
        for micro in range(2):
            world.backward(scaler.scale(world.loss(0, 2 * i + micro)))
        if i == 1:
            world.grad(1).view(-1)[0] = overflow
        if unscales:
            scaler.unscale_(world.optimizer())
            act(world)
        for n, optimizer in enumerate(world.optimizers):
            scaler.step(optimizer)
            world.stepped(n)
        scaler.update()
        world.see("scaler", scaler.state_dict())
        if i > 1:
            world.look()


@deed(weight=0, **SCALED)
def scaled_and_folded(world, **chosen):
    scaled_iterations(world, **chosen)


@deed(setup={"fold": False}, **SCALED)
def scaled_and_not_folded(world, **chosen):
    scaled_iterations(world, **chosen)


TWO = [{"kind": "AdamW", "over": "even"}, {"kind": "SGD", "over": "odd"}]


@deed(setup={"optimizers": TWO}, kinds=("AdamW",), **OF_ONE_SCALE)
def one_scaler_of_two_optimizers(world, **chosen):
    scaled_iterations(world, **chosen)


@deed(setup={"max_grad_norm": 0.05}, **{**OF_ONE_SCALE, "backward": raises("max_grad_norm")})
def scaled_with_max_grad_norm(world, **chosen):
    scaled_iterations(world, **chosen)


@deed(weight=0, kinds=("AdamW",), models=("mlp in float64", "mlp in bfloat16"), **OF_ONE_SCALE)
def scaled_in_another_dtype(world, **chosen):
    scaled_iterations(world, **chosen)
