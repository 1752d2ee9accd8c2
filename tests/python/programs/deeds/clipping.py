# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: optfuse.clip_grad_norm_(), which for stock optimizers is torch's."""

import copy

import torch
from torch import nn

import optfuse
from programs.deed import BATCH, BOOL, EITHER, INDEX, STEP, deed, raises
from programs.deeds.keeping import go_on_with_deepcopies
from programs.deeds.reading import READS, saved
from programs.deeds.training import step_with_closure
from programs.deeds.tuning import add_a_group, flush, flush_everything
from programs.deeds.writing import OF_GRADIENTS
from programs.optimizers import has_closure, has_no_attributes

OVER = {
    "optimizer": lambda world, i: world.optimizer(i),
    "parameters": lambda world, i: world.params(),
    "parameters of a model": lambda world, i: world.model(i).parameters(),
    "one parameter": lambda world, i: world.param(i),
    "one of them twice": lambda world, i: [*world.params(), world.param(i)],
}
ORDERS = (2.0, 2.0, 2.0, 1.0, float("inf"))
NORMS = (0.05, 0.05, 0.0, 1e4)  # the last one leaves gradients as they are


@deed(
    "anywhere",
    weight=4,
    over=OVER,
    index=INDEX,
    max_norm=NORMS,
    order=ORDERS,
    foreach=(None, None, False),
    strict=(False, False, True),
    backward=EITHER,
)
def clip_by_optfuse(world, over, index, max_norm, order, foreach, strict):
    norm = optfuse.clip_grad_norm_(over(world, index), max_norm, order, strict, foreach)
    world.see("norm", norm)


@deed(
    weight=5,
    model=INDEX,
    batch=BATCH,
    over=OVER,
    times=(1, 1, 2),
    max_norm=NORMS,
    order=ORDERS,
    look=(False, False, True),
    set_to_none=BOOL,
    backward=EITHER,
)
def clipped_by_optfuse(world, model, batch, over, times, max_norm, order, look, set_to_none):
    for optimizer in world.optimizers:
        optimizer.zero_grad(set_to_none)
    world.backward(world.loss(model, batch))
    for _ in range(times):
        clip_by_optfuse(world, over, model, max_norm, order, None, False)
        max_norm *= 0.5
    if look:
        world.see("gradients", [p.grad for p in world.params()])
    for i in range(len(world.optimizers)):
        world.step(i)


@deed(weight=2, model=INDEX, batch=BATCH, over=OVER, backward=EITHER)
def clipped_before_more_is_added(world, model, batch, over):
    """Gradients that a later pass adds are not clipped."""
    world.backward(world.loss(model, batch))
    clip_by_optfuse(world, over, model, 0.05, 2.0, None, False)
    world.backward(world.loss(model, batch + 1))
    for i in range(len(world.optimizers)):
        world.step(i)


# ---- whatever happens to clipped gradients

HALF = {
    "in place": lambda p: p.grad.mul_(0.5),
    "through .data": lambda p: p.grad.data.mul_(0.5),
    "by another one": lambda p: setattr(p, "grad", p.grad * 0.5),
    "by other data": lambda p: setattr(p.grad, "data", torch.full_like(p, 0.25)),
    "by none": lambda p: setattr(p, "grad", None),
}


def gradients(world):
    return [p.grad for p in world.params()]


def clip(world, max_norm=0.01):
    world.see("norm", optfuse.clip_grad_norm_(world.params(), max_norm))


def clip_with_torch(world):
    world.see("norm", nn.utils.clip_grad_norm_(world.params(), 0.01))
    nn.utils.clip_grad_value_(world.params(), 1e-3)


def clip_with_an_alias(world):
    aliases = [grad.detach() for grad in gradients(world)]
    clip(world)
    world.see("aliases", aliases)


def flush_both(world):
    flush(world, 0)
    flush_everything(world)


def step(world):
    for i in range(len(world.optimizers)):
        world.step(i)


def step_and_use(world):
    step(world)
    world.see("output", world.loss(0, 3))


def step_and_clip(world):
    step(world)
    clip(world)


ACTS = {
    "look": lambda world: world.see("gradients", gradients(world)),
    "norms": lambda world: world.see("norms", [grad.norm() for grad in gradients(world)]),
    "clip": clip,
    "add": lambda world: world.backward(world.loss(0, 5)),
    "zero": lambda world: world.optimizer().zero_grad(set_to_none=False),
    "copy": lambda world: world.see("copies", copy.deepcopy(gradients(world))),
    "save": lambda world: world.see("saved", saved(gradients(world))),
    "another group": lambda world: add_a_group(world, 0, 3),
    **{act.__name__: act for act in (clip_with_torch, clip_with_an_alias, flush_both)},
    **{act.__name__: act for act in (step, step_and_use, step_and_clip)},
    **{
        f"half {name}": lambda world, way=way: [way(p) for p in world.params()]
        for name, way in HALF.items()
    },
    **{
        f"read, {name}": lambda world, way=way: world.see("read", way(world.grad()))
        for name, way in READS.items()
        if name != "cond"  # see reading.py
    },
    **{
        f"write, {name}": lambda world, way=way: way(world.grad())
        for name, way in OF_GRADIENTS.items()
        if name != "data ="  # half by other data
    },
}
REFUSED = raises("clipping", "parameter 0 of group 0", "backward mode")


@deed(STEP, weight=0, act=ACTS, backward=REFUSED, fault="factors")
def clip_act_and_step(world, act):
    clip(world, 0.05)
    act(world)
    step(world)


@deed(STEP, weight=0, act=ACTS, backward=REFUSED, fault="factors")
def clip_step_and_act(world, act):
    clip(world, 0.05)
    step(world)
    act(world)
    world.see("gradients", gradients(world))


# ---- Forward(max_grad_norm=)

MAX_NORM = {"setup": {"max_grad_norm": 0.05}, "backward": raises("has no max_grad_norm=")}


@deed(**MAX_NORM, looks=BOOL)
def iterations_with_max_grad_norm(world, looks):
    for _ in range(2):
        world.train()
        if looks:
            world.see("gradients", gradients(world))


@deed(**MAX_NORM, kinds=lambda kind: has_closure(kind) and has_no_attributes(kind))
def max_grad_norm_with_a_closure_and_in_copies(world):
    step_with_closure(world, 0, 0, 3)
    go_on_with_deepcopies(world)
    step_with_closure(world, 0, 0, 4)
