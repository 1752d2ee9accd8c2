# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: optimizers that share tensors of their state, as b.load_state_dict(a.state_dict()) makes
them: it copies none that has the right dtype and device."""

import copy
import gc

import torch
from torch import nn

import optfuse
from programs.deed import ALONE, BOOL, LEFT, deed, raises
from programs.models import mlp, numbers, rows
from programs.optimizers import made_by

COMPILED = ("SGD", "AdamW", "RMSprop", "NAdam")
RECORDED = ("AdaBelief", "TensorCounter")
BY = (*COMPILED, "Adafactor", *RECORDED, "RegisteredTensors")
SHARES = {"where": ALONE, "proves": False, "by": BY}


def optimizer_of(world, by, params):
    return world.wrap(made_by(by, params))


def train(models, optimizers, i, order=1):
    for optimizer in optimizers:
        optimizer.zero_grad()
    sum(model(rows(i + k)).square().sum() for k, model in enumerate(models)).backward()
    for optimizer in optimizers[::order]:
        optimizer.step()


def begun(world, by):
    """Two models and their optimizers, which have state."""
    models = [mlp(), mlp()]
    optimizers = [optimizer_of(world, by, model.parameters()) for model in models]
    for i in range(2):
        train(models, optimizers, i)
    return models, optimizers


def look(world, models, optimizers):
    for model, optimizer in zip(models, optimizers, strict=True):
        world.see("weights", [p.detach() for p in model.parameters()])
        world.see("state", [dict(optimizer.state[p]) for p in model.parameters()])


def by_loading(a, b):
    b.load_state_dict(a.state_dict())


def by_entries(a, b):
    for p, q in zip(a.param_groups[0]["params"], b.param_groups[0]["params"], strict=True):
        b.state[q] = a.state[p]


def of_one_parameter(a, b):
    b.state[b.param_groups[0]["params"][1]] = a.state[a.param_groups[0]["params"][1]]


def as_a_whole(a, b):
    b.state = a.state


GIVEN = (by_loading, by_entries, of_one_parameter, as_a_whole)


@deed(**SHARES, give=GIVEN, order=(1, -1), product=True)
def two_optimizers_share_state(world, by, give, order):
    models, optimizers = begun(world, by)
    give(*optimizers)
    for i in range(5):
        train(models, optimizers, 2 + i, order)
    look(world, models, optimizers)


@deed(
    **{**SHARES, "by": (*COMPILED, *RECORDED)},
    first=("forward", "backward"),
    product=True,
    backward=LEFT,
)
def two_optimizers_of_both_modes_share_state(world, by, first):
    mode = world.mode
    models, optimizers = [mlp(), mlp()], []
    for model, other in zip(models, ((0, 1) if first == "forward" else (1, 0)), strict=True):
        world.mode = ("forward", "backward")[other] if world.fused else "stock"
        optimizers.append(optimizer_of(world, by, model.parameters()))
    world.mode = mode
    for i in range(7):
        if i == 2:
            by_loading(*optimizers)
        train(models, optimizers, i)
    look(world, models, optimizers)


@deed(ALONE)
def state_that_an_eager_parameter_shares(world):
    """One's pending update is on the other's state."""
    params = a, b = [nn.Parameter(numbers(i, 8)) for i in range(2)]
    first, second = (made_by("AdamW", [p]) for p in params)
    a.grad = numbers(2, 8)
    first.step()
    second.load_state_dict(first.state_dict())
    world.wrap(first)
    if world.fused:
        world.optimizers.append(optfuse.fuse(second, world.mode, eager=[b]))
    for i in range(4):
        a.grad, b.grad = numbers(3 + i, 8), numbers(9 + i, 8)
        first.step()
        second.step()
    world.see("weights", params)


@deed(**SHARES)
def stock_optimizer_shares_state(world, by):
    """It steps later."""
    models = [mlp(), mlp()]
    optimizers = [optimizer_of(world, by, models[0].parameters())]
    optimizers.append(made_by(by, models[1].parameters()))
    for i in range(7):
        if i == 2:
            by_loading(*optimizers)
        train(models, optimizers, i)
    look(world, models, optimizers)


@deed(
    **SHARES,
    both_fused=BOOL,
    product=True,
    backward=raises(),
)
def shallow_copy_of_an_optimizer(world, by, both_fused):
    """In backward mode two optimizers can't have the same parameters."""
    model = mlp()
    optimizer = optimizer_of(world, by, model.parameters())
    for i in range(6):
        if i == 2:
            other = copy.copy(optimizer)
            other = world.wrap(other) if both_fused else other
        train([model], [optimizer, other] if i > 1 else [optimizer], i)
    look(world, [model], [optimizer])


@deed(**SHARES)
def group_whose_state_another_optimizer_has(world, by):
    models = [mlp(), mlp()]
    optimizers = [optimizer_of(world, by, of.parameters()) for of in (models[0], models[1][0])]
    for i in range(6):
        if i == 2:
            optimizers[1].zero_grad()
            models[1][2].zero_grad()
            late = list(models[1][2].parameters())
            for p, q in zip(models[0][2].parameters(), late, strict=True):
                optimizers[1].state[q] = optimizers[0].state[p]
            optimizers[1].add_param_group({"params": late})
        train(models, optimizers, i, order=1 if i < 2 else -1)
    look(world, models, optimizers)


@deed(**SHARES, still=BOOL, product=True)
def new_optimizer_takes_over_the_state(world, by, still):
    """still: the old one lives on, unused."""
    model = mlp()
    old = optimizer_of(world, by, mlp().parameters())
    params = old.param_groups[0]["params"]
    for i in range(2):
        for k, p in enumerate(params):
            p.grad = torch.full_like(p, i - k)
        old.step()
    new = optimizer_of(world, by, model.parameters())
    new.load_state_dict(old.state_dict())
    if not still:
        del old, params, p
        world.optimizers[:] = [new]
        world.references[:-1] = []
    for i in range(4):
        train([model], [new], 2 + i)
    look(world, [model], [new])
    if world.mode == "backward" and by in COMPILED:
        assert optfuse.summary(new).created > 0


@deed(ALONE, by=("SGD", "AdamW", "AdaBelief", "RegisteredTensors"), proves=False)
def optimizer_whose_state_was_shared_is_alone_again(world, by):
    """Its updates run in backward again."""
    models, optimizers = begun(world, by)
    by_loading(*optimizers)
    train(models, optimizers, 2)
    for waits in (True, False):
        optimizers[-1].zero_grad()
        before = [p.detach().clone() for p in models[1].parameters()]
        models[1](rows(3)).square().sum().backward()
        if world.mode == "backward":
            assert [*map(torch.equal, before, models[1].parameters())] == [waits] * 4
        optimizers[-1].step()
        del optimizers[:-1], world.optimizers[:-1]
    world.see("weights", list(models[1].parameters()))


def a_copy(optimizers):
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))


def unfused(optimizers):
    """Who keeps the error: the frame that raised it must not ask a plan that is gone."""
    optfuse.unfuse(optimizers[0])
    gc.collect()


MESSAGE = (
    "parameter 0 of group 0",
    "in common with parameter 0 of group 0",
    "of another optimizer",
)


@deed(ALONE, by=COMPILED, way=(a_copy, unfused), product=True)
def state_that_is_shared_too_late(world, by, way):
    """The first pass of backward mode begins with a parameter of the one that gave its state."""
    models, optimizers = begun(world, by)
    for optimizer in optimizers:
        optimizer.zero_grad()
    by_entries(*optimizers)
    for k, model in enumerate(models):
        model(rows(k)).square().sum().backward()
    kept = []

    def step():
        try:
            optimizers[1].step()
        except optfuse.Error as error:
            kept.append(error)
            raise

    if world.mode == "backward":
        world.refused(step, *MESSAGE, way_out="")
        optimizers[0].step()
        way(optimizers)
        optimizers[1].step()
    world.see("raised", bool(kept) or world.mode != "backward")


@deed(ALONE, by=COMPILED, proves=False)
def one_state_of_two_parameters_is_refused(world, by):
    params = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3, 4))]
    optimizer = optimizer_of(world, by, params)

    def iterate():
        optimizer.zero_grad()
        sum(p.square().sum() for p in params).backward()
        optimizer.step()

    iterate()
    if world.fused:
        optimizer.state[params[1]] = optimizer.state[params[0]]
    words = "parameter 0 of group 0", "parameter 1 of group 0"
    world.refused(iterate, *words, way_out="")
    world.see("weights", params)
    optimizer.state[params[1]] = copy.deepcopy(optimizer.state[params[0]])
    iterate()
    world.see("weights", params)


@deed(ALONE, by=("Adafactor", "RegisteredTensors", *RECORDED), proves=False)
def one_state_of_two_parameters(world, by):
    """PyTorch's operators update one after the other."""
    model = world.build("layers")
    optimizer = optimizer_of(world, by, model.parameters())
    for i in range(5):
        world.train()
        if i == 0:
            first, _, last = (layer.weight for layer in model.layers)
            optimizer.state[last] = optimizer.state[first]
    world.see("weights", world.params())
    world.see("state", [dict(optimizer.state[p]) for p in world.params()])
