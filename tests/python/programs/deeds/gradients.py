# SPDX-License-Identifier: BSD-3-Clause
"""Deeds between backward() and step(), on gradients: clipped, changed, exchanged, in the memory of
something else."""

import copy

import torch
from torch.nn import utils

from programs.deed import ANYWHERE, BEFORE_STEP, EITHER, INDEX, deed, raises
from programs.optimizers import KINDS


def with_norm(params):
    norm = utils.get_total_norm([p.grad for p in params])
    utils.clip_grads_with_norm_(params, 0.01, norm)
    return norm


CLIPS = {
    "all": lambda params: utils.clip_grad_norm_(params, 0.01),
    "without foreach": lambda params: utils.clip_grad_norm_(params, 0.01, foreach=False),
    "twice": lambda params: [utils.clip_grad_norm_(params, norm) for norm in (0.05, 0.01)],
    "one of them twice": lambda params: utils.clip_grad_norm_([*params, params[0]], 0.01),
    "some": lambda params: utils.clip_grad_norm_(params[::2], 0.01, error_if_nonfinite=True),
    "1-norm": lambda params: utils.clip_grad_norm_(params, 0.01, 1.0),
    "3-norm": lambda params: utils.clip_grad_norm_(params, 0.01, 3.0),
    "inf norm": lambda params: utils.clip_grad_norm_(params, 0.01, float("inf")),
    "with norm": with_norm,
    "values": lambda params: utils.clip_grad_value_(params, 1e-3),
}


def used(world):
    return [p for p in world.params() if p.grad is not None]


@deed(BEFORE_STEP, backward=EITHER, stock=EITHER, way=CLIPS)
def clip_before_step(world, way):
    if used(world):
        world.see("norm", way(used(world)))


def add_to_itself(p):
    p.grad.add_(p.grad)


def turned(p):
    if p.dim() == 2:
        p.grad = p.grad.t().contiguous().t()


def exchanged(p):
    p.grad = p.grad.clone()


def dropped(p):
    p.grad = None


@deed(
    BEFORE_STEP,
    backward=EITHER,
    index=INDEX,
    change=(add_to_itself, turned, exchanged, dropped),
)
def change_a_gradient_before_step(world, index, change):
    if used(world):
        change(used(world)[index % len(used(world))])


@deed(BEFORE_STEP, backward=EITHER)
def look_at_gradients_before_step(world):
    world.see("gradients", [p.grad for p in world.params()])


@deed(BEFORE_STEP, backward=EITHER, stock=EITHER)
def deepcopy_before_step(world):
    world.see("copies", [p.grad for p in copy.deepcopy(world.model()).parameters()])


@deed(
    ANYWHERE,
    forward=EITHER,
    backward=EITHER,
    stock=EITHER,
    index=INDEX,
    other=INDEX,
    what=("parameter", "state"),
    is_turned=(False, True),
)
def gradient_in_the_memory_of_another(world, index, other, what, is_turned):
    """Perhaps by other strides."""
    p, q = world.param(index), world.param(other + 1)
    found = [q.detach()]
    if what == "state":
        entry = world.optimizer().state.get(q, {})
        found = [t for t in entry.values() if torch.is_tensor(t) and t.shape == p.shape]
    for t in found[:1] if p is not q else ():
        if t.shape == p.shape and t.dtype == p.dtype:
            p.grad = t.detach()
            if is_turned and p.dim() == 2 and p.shape[0] == p.shape[1]:
                p.grad = p.grad.t()


@deed(setup={"ddp": "views"}, backward=raises("already belongs to another optimizer"))
def scale_the_gradients_of_another_optimizer(world):
    """By a step() that is recorded, while updates wait for these gradients. In a bucket of
    DistributedDataParallel's they have a mark, and nothing seals them."""
    optimizer = world.wrap(KINDS["Coupled"].make(world.params(), lr=0.1))
    optimizer.step()
