# SPDX-License-Identifier: BSD-3-Clause
"""Deeds under torch.inference_mode(): state that a step() has made there can't be updated in place
outside of it. Stock raises at the next step(), with counters ahead of the rest; kernels raise
before anything has changed. And under allow_mutation_on_saved_tensors(): a graph goes on with the
weights that it has saved, whatever step() has made of them since."""

import torch
from common import assert_same, snapshot
from torch import nn
from torch.autograd.graph import allow_mutation_on_saved_tensors

from programs.deed import ALONE, EITHER, deed, raises
from programs.models import numbers, rows
from programs.optimizers import CLASSES, made_by


def set_gradients(params, i):
    for k, p in enumerate(params):
        p.grad = numbers(100 * i + k, *p.shape)


def stepped_under_inference_mode(world, by):
    params = [nn.Parameter(numbers(i, *size)) for i, size in enumerate(((3, 5), (7, 2), (4, 4)))]
    optimizer = world.wrap(made_by(by, params))
    set_gradients(params, 0)
    with torch.inference_mode():
        optimizer.step()
    set_gradients(params, 1)
    return params, optimizer


def steps(world, params, optimizer, inside=False):
    for i in range(2, 5):
        with torch.inference_mode(inside):
            optimizer.step()
        world.see("parameters", [p.detach() for p in params])
        set_gradients(params, i)


@deed(ALONE, by=CLASSES)
def step_outside_of_inference_mode(world, by):
    """With clones it goes on. Adagrad makes its state when it is made itself."""
    params, optimizer = stepped_under_inference_mode(world, by)
    if by not in ("Adagrad", "Adafactor", "Muon"):
        before = snapshot([params, optimizer.state_dict()["state"], [p._version for p in params]])
        for _ in range(2):
            world.refused(optimizer.step, "of parameter 0 ", way_out="clone()")
            now = [params, optimizer.state_dict()["state"], [p._version for p in params]]
            assert_same("after the refusal", snapshot(now), before)
    for entry in optimizer.state.values():
        entry.update((k, v.clone()) for k, v in entry.items() if torch.is_tensor(v))
    steps(world, params, optimizer)
    world.see("state", optimizer.state_dict())


@deed(ALONE, by=CLASSES)
def each_step_under_inference_mode(world, by):
    steps(world, *stepped_under_inference_mode(world, by), inside=True)


@deed(ALONE, by=("RegisteredNewTensors",), proves=False)
def class_that_replaces_the_state_of_inference_mode(world, by):
    steps(world, *stepped_under_inference_mode(world, by))


@deed(ALONE, by=("RegisteredTensors",), proves=False, stock=EITHER, backward=EITHER)
def class_that_updates_the_state_of_inference_mode(world, by):
    """It raises as in stock."""
    steps(world, *stepped_under_inference_mode(world, by))


MUTATED = {"where": ALONE, "backward": raises("allow_mutation_on_saved_tensors"), "goes_on": True}


@deed(**MUTATED, by=("AdamW", "SGD", "AdaBelief"), steps=(1, 2), product=True)
def graph_from_before_step(world, by, steps):
    model, optimizer = world.own(make=lambda params: made_by(by, params))
    for i in range(3):
        with allow_mutation_on_saved_tensors():
            optimizer.zero_grad()
            x = rows(i).requires_grad_()
            loss = model(x).square().mean()
            world.backward(loss, retain_graph=True)
            for _ in range(steps):
                world.step(0)
            world.see("slope", torch.autograd.grad(loss, x, retain_graph=True)[0])
            optimizer.zero_grad()
            loss.backward()
            world.see("gradients", [p.grad for p in model.parameters()])
            del loss, x
        world.step(0)
    world.look(gradients=False)


@deed(**MUTATED)
def graph_that_has_saved_state(world):
    model, optimizer = world.own()
    factor = torch.ones((), requires_grad=True)
    for i in range(3):
        with allow_mutation_on_saved_tensors():
            optimizer.zero_grad()
            world.backward(model(rows(i)).square().mean())
            averages = [entry["exp_avg"] for entry in optimizer.state.values()]
            total = sum((average * factor).sum() for average in averages) + 0 * factor
            del averages
            world.step(0)
            world.see("slope", torch.autograd.grad(total, factor)[0])
            del total
    world.look(gradients=False)


@deed(**MUTATED)
def training_under_mutation(world):
    world.own()
    with allow_mutation_on_saved_tensors():
        for _ in range(4):
            world.train()
    world.look(gradients=False)
