# SPDX-License-Identifier: BSD-3-Clause
"""Deeds in forward and backward passes: what is computed there, in which thread and order."""

import torch
from common import adamw
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import optfuse
from programs.deed import (
    ALONE,
    BACKWARD,
    BEFORE_BACKWARD,
    BEFORE_FUSE,
    EITHER,
    IN_BACKWARD,
    INDEX,
    deed,
    elsewhere,
)
from programs.models import rows


@deed(BEFORE_FUSE)
def train_before_fuse(world):
    """Fused in the middle of a training."""
    for _ in range(2):
        world.train()


@deed(BACKWARD)
def backward_in_another_thread(world, loss):
    elsewhere(world.backward, loss)


@deed()
def train_in_another_thread(world):
    elsewhere(world.train)


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


def with_checkpoint(use_reentrant):
    def call(model, x):
        return model[2](checkpoint(model[:2], x.requires_grad_(), use_reentrant=use_reentrant))

    return call


def with_functional_call(model, x):
    return torch.func.functional_call(model, dict(model.named_parameters()), (x,))


def with_autocast(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float()


def with_double_backward(model, x):
    out = model(x.requires_grad_()).square().mean()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    return out + slope.square().sum()


def with_create_graph(model, x):
    """Double backward through the weights themselves."""
    out = model(x).square().mean()
    slopes = torch.autograd.grad(out, list(model.parameters()), create_graph=True)
    return out + sum(s.square().sum() for s in slopes)


def with_forward_ad(model, x):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(model(dual)).primal


def with_saved_tensor_hooks(model, x):
    with torch.autograd.graph.save_on_cpu():
        return model(x)


CALLS = {
    "checkpoint, reentrant": with_checkpoint(True),
    "checkpoint": with_checkpoint(False),
    "functional_call": with_functional_call,
    "vmap": lambda model, x: torch.vmap(model)(x),
    "autocast": with_autocast,
    "double backward": with_double_backward,
    "create_graph": with_create_graph,
    "forward-mode AD": with_forward_ad,
    "saved-tensor hooks": with_saved_tensor_hooks,
}


@deed(weight=0, way=CALLS)
def call_an_mlp_otherwise(world, way):
    """Looks, while updates of it are pending."""
    world.see("output", way(world.model(), rows(7)))
    world.train(lambda: world.loss(0, world.i, lambda x: way(world.model(), x)))


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


class Branching(nn.Module):
    """An operator that takes functions, which PyTorch dispatches in Python."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.a(x).sin(), lambda x: self.b(x).cos(), (x,))


@deed(ALONE, proves=False)
def train_an_exported_condition(world):
    exported = torch.export.export(Branching(), (rows(0),)).module()
    world.kinds, world.models = ["mlp"], [exported]
    world.wrap(adamw(exported.parameters()))
    for _ in range(5):
        world.train()
    world.look(gradients=False)


@deed(ALONE, bucket_bytes=(0, 1, 100, 200, 1 << 30))
def buckets_of_any_size(world, bucket_bytes):
    world.bucket_bytes = bucket_bytes
    world.own("layers")
    for _ in range(5):
        world.train()
    world.look(gradients=False)


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
