# SPDX-License-Identifier: BSD-3-Clause
"""Deeds in forward and backward passes: what is computed there, in which thread and order."""

import threading

import torch

import optfuse
from programs.deed import (
    BACKWARD,
    BEFORE_BACKWARD,
    BEFORE_FUSE,
    BOOL,
    EITHER,
    IN_BACKWARD,
    INDEX,
    deed,
)


@deed(BEFORE_FUSE)
def train_before_fuse(world):
    """Fused in the middle of a training."""
    for _ in range(2):
        world.train()


@deed(BACKWARD)
def backward_in_another_thread(world, loss):
    thread = threading.Thread(target=world.backward, args=(loss,))
    thread.start()
    thread.join()


@deed()
def train_in_another_thread(world):
    thread = threading.Thread(target=world.train)
    thread.start()
    thread.join()


@deed(BACKWARD, backward=EITHER)
def backward_twice_over_one_graph(world, loss):
    world.backward(loss, retain_graph=True)
    world.backward(loss)


@deed(BEFORE_BACKWARD)
def gradients_by_autograd_grad(world):
    """They update nothing by themselves."""
    used = [p for p in world.params() if p.requires_grad]
    found = torch.autograd.grad(world.loss(0, 7), used, allow_unused=True)
    world.see("gradients", [g for g in found if g is not None])


def functional(world, x):
    named = {name: p * 1.0 for name, p in world.model().named_parameters()}
    return torch.func.functional_call(world.model(), named, (x,), tie_weights=True)


def hooked_output(world, x):
    out = world.model()(x)
    out.register_hook(lambda g: g.mul_(2) if g.is_contiguous() else g * 2)
    return out


@deed(way=(functional, hooked_output))
def call_the_model_otherwise(world, way):
    world.train(lambda: world.loss(0, world.i, lambda x: way(world, x)))


@deed(weight=0)
def call_the_model_row_by_row(world):
    world.train(lambda: world.loss(0, world.i, torch.vmap(world.model())))


TENSOR_HOOKS = {
    "double": lambda g: g * 2,
    "add to itself": lambda g: g + g,
    "in place": lambda g: g.mul_(3) if g.is_contiguous() else g,
    "new": lambda g: torch.ones_like(g),
}


@deed(index=INDEX, change=TENSOR_HOOKS)
def tensor_hook_in_an_iteration(world, index, change):
    p = world.param(index)
    if p.is_leaf and p.requires_grad:
        handle = p.register_hook(change)
        world.train()
        handle.remove()


AFTER_ACCUMULATION = {
    "in place": lambda world, p: p.grad.mul_(0.5),
    "add to itself": lambda world, p: p.grad.add_(p.grad),
    "look": lambda world, p: world.see("gradient", p.grad),
    "keep": lambda world, p: world.held.append(("gradient of a hook", p.grad)),
}


@deed(IN_BACKWARD, way=AFTER_ACCUMULATION)
def hook_on_each_gradient(world, way):
    way(world, world.hooked)


ORDERS = {
    "last": ("last", {}),
    "reverse_first": ("reverse_first", {"k": 1}),
    "auto": ("auto", {"network": (0.0, 1e-6)}),
    "budget": ("budget", {"memory": 1 << 20}),
}


@deed(how=ORDERS)
def iteration_in_another_order(world, how):
    """The bits are stock's in any order of a backward pass."""
    if not world.fused or world.ddp is not None:
        world.train()
        return
    name, options = how
    with optfuse.reorder(world.model(), name, **options):
        world.train()


@deed(weight=1, inside=BOOL)
def iteration_with_promised_gradients(world, inside):
    """Products that are computed when their update is: layers of any size."""
    with world.environment(OPTFUSE_PRODUCTS="force"):
        world.train()
        if inside:
            world.look(gradients=False)
