# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: what is done to optimizers."""

import gc

import torch
from torch import nn
from torch.optim import lr_scheduler

import optfuse
from programs.deed import EITHER, INDEX, deed, raises
from programs.optimizers import EVERY
from programs.reference import Dense


@deed("anywhere", weight=3, optimizer=INDEX, group=INDEX, lr=(0.1, 1e-3, 0.0))
def set_lr(world, optimizer, group, lr):
    groups = world.optimizer(optimizer).param_groups
    chosen = groups[group % len(groups)]
    if torch.is_tensor(chosen["lr"]):
        chosen["lr"].fill_(lr)
    else:
        chosen["lr"] = lr


@deed("anywhere", optimizer=INDEX, value=(0.0, 0.1))
def set_weight_decay(world, optimizer, value):
    for group in world.optimizer(optimizer).param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = value


@deed("anywhere", optimizer=INDEX)
def set_betas_or_momentum(world, optimizer):
    for group in world.optimizer(optimizer).param_groups:
        if "betas" in group:
            group["betas"] = (0.5, 0.9, 0.8)[: len(group["betas"])]
        elif "momentum" in group:
            group["momentum"] = 0.5


@deed("anywhere", weight=2, optimizer=INDEX)
def toggle_maximize(world, optimizer):
    for group in world.optimizer(optimizer).param_groups:
        if "maximize" in group:
            group["maximize"] = not group["maximize"]


@deed("anywhere", weight=1, optimizer=INDEX, stock=EITHER, backward=EITHER)
def toggle_amsgrad_or_nesterov(world, optimizer):
    for group in world.optimizer(optimizer).param_groups:
        if "amsgrad" in group:
            group["amsgrad"] = not group["amsgrad"]
        elif group.get("momentum", 0) > 0 and group["dampening"] == 0:
            group["nesterov"] = not group["nesterov"]


def sequence(o):
    parts = [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    return lr_scheduler.SequentialLR(o, parts, [2])


def chain(o):
    return lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 2), lr_scheduler.LinearLR(o)])


def cyclic(o):
    has_momentum = not {"momentum", "betas"}.isdisjoint(o.defaults)
    return lr_scheduler.CyclicLR(o, 1e-3, 0.1, step_size_up=2, cycle_momentum=has_momentum)


SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + i)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda i: 0.9),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": cyclic,
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=60),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": sequence,
    "ChainedScheduler": chain,
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, 3),
}


@deed("anywhere", weight=4, optimizer=INDEX, kind=SCHEDULERS)
def add_a_scheduler(world, optimizer, kind):
    world.schedulers.append(kind(world.optimizer(optimizer)))


@deed("anywhere", weight=8, index=INDEX)
def step_a_scheduler(world, index):
    if not world.schedulers:
        return
    scheduler = world.schedulers[index % len(world.schedulers)]
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()
    rates = [g["lr"] for o in world.optimizers for g in o.param_groups]
    world.see("learning rates", rates)


@deed(optimizer=INDEX, rows=(1, 3, 17), every=EVERY)
def add_a_group(world, optimizer, rows):
    p = nn.Parameter(torch.linspace(-1, 1, rows * 3).view(rows, 3))
    world.extra.append(p)
    world.optimizer(optimizer).add_param_group({"params": [p], "lr": 0.2})


@deed(weight=1, optimizer=INDEX)
def take_a_group_away(world, optimizer):
    groups = world.optimizer(optimizer).param_groups
    if len(groups) > 1:
        groups.pop(0)


@deed(index=INDEX)
def toggle_requires_grad(world, index):
    p = world.param(index)
    if p.is_leaf:
        p.requires_grad_(not p.requires_grad)


@deed(weight=3, optimizer=INDEX)
def flush(world, optimizer):
    if world.fused:
        optfuse.flush(world.optimizer(optimizer))


@deed()
def flush_everything(world):
    if world.fused:
        optfuse.flush()


@deed(optimizer=INDEX)
def unfuse_and_fuse_again(world, optimizer):
    """unfuse() drops the gradients that backward fusion has consumed (docs/hazards.md)."""
    chosen = world.optimizer(optimizer)
    if world.fused:
        optfuse.unfuse(chosen)
        world.wrap(chosen)
    chosen.zero_grad()


@deed(optimizer=INDEX, model=INDEX, batch=(0, 1))
def train_one_round_unfused(world, optimizer, model, batch):
    chosen = world.optimizer(optimizer)
    if world.fused:
        dense = Dense(optfuse.unfuse(chosen), world.max_norm)
    try:
        world.train(lambda: world.loss(model, batch))
    finally:
        if world.fused:
            dense.take_off()
            world.wrap(chosen)


@deed(optimizer=INDEX)
def replace_the_optimizer(world, optimizer):
    """By a new one over the same parameters; the old one is dropped."""
    i = optimizer % len(world.optimizers)
    world.schedulers.clear()
    world.unsettled.discard(i)
    world.optimizers[i] = None
    world.optimizers[i] = world.wrap(world.make(world.specs[i]))


@deed("anywhere", weight=1)
def collect_garbage(world):
    gc.collect(1)


@deed("anywhere", weight=3, optimizer=INDEX, backward=EITHER)
def hook_before_step(world, optimizer):
    """One that changes what step() does."""

    def halve(chosen, args, kwargs):
        for group in chosen.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] *= 0.5

    world.add_step_hook(optimizer, halve)


def halve_gradients(chosen, args, kwargs):
    for group in chosen.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)


@deed("anywhere", weight=4, optimizer=INDEX, backward=EITHER)
def hook_before_step_on_gradients(world, optimizer):
    world.add_step_hook(optimizer, halve_gradients)


@deed(setup={"max_grad_norm": 0.01}, backward=raises("max_grad_norm"), weight=0, proves=False)
def hook_on_gradients_that_step_clips(world):
    """By whatever it leaves."""
    world.add_step_hook(0, halve_gradients)


@deed(weight=4, backward=EITHER)
def hook_on_gradients_of_a_loaded_optimizer(world):
    """PyTorch's load_state_dict() wraps a step() that does not say that it runs hooks."""
    world.optimizer().load_state_dict(world.optimizer().state_dict())
    world.add_step_hook(0, halve_gradients)
