# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: iterations scaled by torch.amp.GradScaler, some of which overflow; unscaling and clipping
are folded into the updates, or not."""

import math

import torch
from common import adamw
from torch import nn

import optfuse
from programs.deed import ALONE, EITHER, STEP, deed, raises
from programs.optimizers import made_by


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


def clip_by_torch(world):
    world.see("norm", nn.utils.clip_grad_norm_(world.params(), 0.05))
    world.see("gradients", [p.grad for p in world.params()])


ACTS = {
    "clip by torch": clip_by_torch,
    "clip": lambda world: clip(world, 0.05),
    "nothing": lambda world: None,
    **{
        f"clip by a norm of {order}": lambda world, order=order: clip(world, 0.05, order)
        for order in (1.0, math.inf, 3.0)
    },
    "clip one by one": lambda world: clip(world, 0.05, foreach=False),
    **{
        act.__name__: act
        for act in (
            clip_three_times,
            clip_by_both,
            look,
            look_and_clip,
            add_and_clip,
        )
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


@deed(weight=0, kinds=("AdamW", "Adagrad", "Elementwise"))
def scaler_that_is_disabled(world):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(2):
        world.optimizer().zero_grad()
        world.backward(scaler.scale(world.loss(0, world.i)))
        scaler.unscale_(world.optimizer())
        scaler.step(world.optimizer())
        world.stepped(0)
        scaler.update()
        world.look(gradients=False)


@deed(ALONE, fold=(True, False), proves=False, backward=EITHER)
def scaled_gradients_that_others_see(world, fold):
    """They are parts of one tensor."""
    world.fold, params = fold, [nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(8, 5))]
    optimizer = world.wrap(adamw(params))
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    for i in range(5):
        kept = torch.linspace(-1, 1 + i, 80) * 65536
        scaler.scale(torch.ones(()))
        params[0].grad, params[1].grad = kept[:40], kept[40:].view(8, 5)
        scaler.unscale_(optimizer)
        world.see("norm", optfuse.clip_grad_norm_(params, 0.05))
        scaler.step(optimizer)
        scaler.update()
        world.see("kept", [kept, *params])


# ---- scales that a script sets: on the CPU fused=True divides gradients, or leaves out the step


def set_scale(optimizer, grad_scale=None, found_inf=None):
    for name, value in (("grad_scale", grad_scale), ("found_inf", found_inf)):
        setattr(optimizer, name, None if value is None else torch.tensor(value))


BY_HAND = {
    "scale": [{"grad_scale": 8.0}] * 4,
    "overflow": [{}, {"found_inf": 1.0}, {"found_inf": 0.0}, {}],
    "both": [{"grad_scale": 3.0, "found_inf": float(i == 2)} for i in range(4)],
    "now and then": [{}, {"grad_scale": 0.1}, {}, {"grad_scale": 2.0, "found_inf": 1.0}, {}],
}
OF_FUSED = {"kinds": ("AdamW", "SGD", "Adam", "Adagrad"), "every": True}


def iterations_with_scales(world, scales):
    for chosen in scales:
        set_scale(world.optimizer(), **chosen)
        world.train()
        if chosen and world.optimizer().param_groups[0].get("fused"):
            world.see("gradients", [p.grad for p in world.params()])
    set_scale(world.optimizer())


@deed(weight=0, scales=BY_HAND, **OF_FUSED, models=("mlp", "convolution in channels_last"))
def scale_before_backward(world, scales):
    iterations_with_scales(world, scales)


@deed(setup={"accumulate": 2}, scales=BY_HAND, **OF_FUSED)
def scale_before_passes_that_are_counted(world, scales):
    iterations_with_scales(world, scales)


LATE = {"scale": {"grad_scale": 8.0}, "overflow": {"grad_scale": 2.0, "found_inf": 1.0}}


@deed(
    STEP,
    weight=0,
    scales=LATE,
    **OF_FUSED,
    backward=EITHER,
)
def scale_before_step(world, scales):
    set_scale(world.optimizer(), **scales)
    world.step(0)
    set_scale(world.optimizer())


@deed(ALONE, by=("Adam", "AdamW", "Adagrad"))
def overflow_in_the_first_step(world, by):
    """SGD's buffer has no numbers then, in stock."""
    world.own(make=lambda params: made_by(by, params))
    iterations_with_scales(world, [{"found_inf": 1.0}, {"grad_scale": 2.0}, {}])
    world.look(gradients=False)


@deed(weight=0, kinds=("RMSprop", "NAdam"))
def scale_that_nobody_reads(world):
    iterations_with_scales(world, BY_HAND["both"])


@deed(STEP, weight=0, kinds=("Adafactor",), name=("grad_scale", "found_inf"))
def scale_that_the_class_refuses(world, name):
    """It asserts that there is none, and goes on without."""
    set_scale(world.optimizer(), **{name: 0.0})
    try:
        world.optimizer().step()
    except AssertionError as error:
        world.see("error", str(error))
    set_scale(world.optimizer())
    world.step(0)
