# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: a consumed gradient that is overwritten by hand holds what was written, and so do its
aliases; between backward() and step() that is refused."""

import torch
from common import sgd
from torch import nn

from programs.deed import ALONE, BEFORE_STEP, EITHER, LAUNCHES, STEP, deed, raises
from programs.models import rows

LATE = "between backward() and step()"


def with_all(value):
    """`p.grad[...] = value`"""
    return lambda p: p.grad.__setitem__(..., value)


def seeded(draw):
    return lambda p: (torch.manual_seed(3), draw(p))


OVERWRITES = {
    "zero_": lambda p: p.grad.zero_(),
    "zero_ of data": lambda p: p.grad.data.zero_(),
    "zero_ of detach()": lambda p: p.grad.detach().zero_(),
    "detach_, zero_": lambda p: p.grad.detach_().zero_(),
    "fill_": lambda p: p.grad.fill_(0.5),
    "fill_ with a tensor": lambda p: p.grad.data.fill_(torch.tensor(0.5)),
    "copy_": lambda p: p.grad.copy_(torch.linspace(0, 1, p.numel()).view_as(p)),
    "copy_ of a number": lambda p: p.grad.detach().copy_(torch.tensor(2.0)),
    "[...] = number": with_all(0.25),
    "[...] = tensor": with_all(torch.tensor(0.25)),
    "[:] =": lambda p: p.grad.data.__setitem__(slice(None), 0.0),
    "normal_": seeded(lambda p: p.grad.normal_()),
    "init.uniform_": seeded(lambda p: nn.init.uniform_(p.grad)),
    "_foreach_zero_": lambda p: torch._foreach_zero_([p.grad]),
    "_foreach_zero_ of aliases": lambda p: torch._foreach_zero_([p.grad.data, p.grad.detach()]),
    "_foreach_copy_": lambda p: torch._foreach_copy_([p.grad], [torch.ones_like(p)]),
}
REPLACES = {
    "zeros_like": lambda p: setattr(p, "grad", torch.zeros_like(p.grad)),
    "data =": lambda p: setattr(p.grad, "data", torch.zeros_like(p)),
}
OF_ALIASES = (
    "zero_ of data",
    "zero_ of detach()",
    "fill_ with a tensor",
    "copy_ of a number",
    "[:] =",
    "_foreach_zero_ of aliases",
)
OF_DTENSORS = {name: way for name, way in OVERWRITES.items() if name not in OF_ALIASES}
KINDS = ("SGD", "AdamW")


def add_to_gradients(world):
    world.see("gradients", [p.grad for p in world.params()])
    world.backward(world.loss(0, world.i))
    world.step(0)


@deed(way=OVERWRITES, weight=0, kinds=KINDS)
@torch.no_grad()
def overwrite_gradients(world, way):
    """The next ones are added."""
    aliases = [(p.grad.data, p.grad.detach()) for p in world.params()]
    for p in world.params():
        way(p)
    world.see("aliases", aliases)
    with torch.enable_grad():
        add_to_gradients(world)


@deed(way=REPLACES, weight=0, kinds=KINDS)
def replace_gradients_by_zeros(world, way):
    for p in world.params():
        way(p)
    add_to_gradients(world)


@deed(
    BEFORE_STEP,
    way=OVERWRITES,
    weight=0,
    kinds=KINDS,
    backward=raises(LATE),
    goes_on=True,
    fault=("overwritten", "discarded"),
)
@torch.no_grad()
def overwrite_gradients_before_step(world, way):
    for p in world.params():
        way(p)


@deed(
    BEFORE_STEP,
    way=OF_DTENSORS,
    weight=0,
    kinds=("AdamW",),
    models=("replicated",),
    stock=EITHER,
    backward=raises(LATE),
    goes_on=True,
)
@torch.no_grad()
def overwrite_dtensors_before_step(world, way):
    for p in world.params():
        way(p)


ALIASES = {"way": {name: OVERWRITES[name] for name in OF_ALIASES}, "models": ("replicated",)}


@torch.no_grad()
def can_not_be_overwritten(world, way):
    """PyTorch can't, and the gradient stays consumed."""
    for p in world.params() if world.mode == "backward" else ():
        try:
            way(p)
        except RuntimeError:
            world.refused(p.grad.sum, "already applied")
        else:
            raise AssertionError("it was overwritten")


@deed(**ALIASES, weight=0, kinds=("AdamW",))
def overwrite_an_alias_of_a_dtensor(world, way):
    can_not_be_overwritten(world, way)


@deed(BEFORE_STEP, **ALIASES, weight=0, kinds=("AdamW",))
def overwrite_an_alias_of_a_dtensor_before_step(world, way):
    can_not_be_overwritten(world, way)


@deed(weight=0, kinds=("SGD", "AdamW"))
def overwrite_gradients_beside_a_sparse_one(world):
    """In one list."""
    sparse = torch.ones(3, 2).to_sparse()
    torch._foreach_zero_([sparse, *(p.grad for p in world.params())])
    world.see("gradients", [sparse, *(p.grad for p in world.params())])


OLDER = {"weight": 0, "kinds": ("AdamW",), "fault": "consumed_alias"}


@deed(way={"itself": lambda g: g, "data": lambda g: g.data}, **OLDER)
def zero_an_older_gradient(world, way):
    """It is none of the next one."""
    if world.turn:
        world.saved[-1].zero_()
    gradient = world.grad()
    world.saved.append(way(gradient))
    if world.mode == "backward":
        world.refused(gradient.sum, "already applied")


@deed(models=("replicated",), **{**OLDER, "fault": ()})
def zero_an_older_dtensor(world):
    zero_an_older_gradient(world, lambda g: g)


@deed(BEFORE_STEP, weight=0)
def make_zeros_like_gradients_before_step(world):
    for p in world.params():
        world.see("zeros", torch.zeros_like(p.grad))
        world.see("ones", p.grad.new_ones(3))
        world.see("numbers", p.grad.new_tensor([2.0]))
        world.see("shape", list(torch.empty_like(p.grad).shape))


TIMES_ZERO = {
    "mul_": lambda g: g.mul_(0),
    "*=": lambda g: g.__imul__(0),
    "mul_ of data": lambda g: g.data.mul_(0),
}


@deed(
    way=TIMES_ZERO,
    weight=0,
    kinds=KINDS,
    backward=raises("already applied", "zero_()"),
    forward=LAUNCHES,
)
def multiply_a_gradient_by_zero(world, way):
    """Needs its numbers: stock leaves -0.0 and NaN."""
    way(world.grad())
    world.see("gradient", world.grad())


@deed(models=("odd", "convolution in channels_last"), weight=0, kinds=("AdamW",), every=True)
def zero_gradients_in_place(world):
    """They lie in memory as their parameter."""
    world.optimizer().zero_grad(set_to_none=False)
    gradients = [p.grad for p in world.params() if p.grad is not None]
    world.see("strides", [list(grad.stride()) for grad in gradients])
    world.see("zeros", [p.grad for p in world.params()])


# ---- a used gradient in the place of another one


def each(change):
    def put(world):
        for p in world.params():
            p.grad = change(p)

    return put


def exchanged(world):
    a, b = world.param(1), world.param(3)
    a.grad, b.grad = b.grad, a.grad


def of_earlier_step(world):
    for p, grad in zip(world.params(), world.saved, strict=True):
        p.grad = grad


def data_of_another(world):
    world.param(0).grad.data = world.param(2).grad.data


def with_a_new_group(put):
    def both(world):
        put(world)
        world.optimizer().add_param_group({"params": [nn.Parameter(torch.ones(2))]})

    return both


def of_an_alias(world):
    world.param(0).grad = world.param(2).grad.detach()


def data_rounded(world):
    world.param().grad.data = world.param().grad.bfloat16().float()


def dropped_and_back(world):
    for p in world.params():
        grad, p.grad = p.grad, None
        p.grad = grad


def exchanged_twice(world):
    exchanged(world)
    exchanged(world)


def its_own_data(world):
    for p in world.params():
        p.grad.data = p.grad.data


#: Stock's step() uses other numbers than backward() has made for this parameter.
OTHERS = {
    "of the step before": of_earlier_step,
    "exchanged": exchanged,
    "data of another parameter": data_of_another,
    "exchanged, then a new group": with_a_new_group(exchanged),
    "of another parameter, aliased": of_an_alias,
    "rounded": each(lambda p: p.grad.half().float()),
    "data rounded": data_rounded,
}
#: It uses the same.
ITS_OWN = {
    "dropped and put back": dropped_and_back,
    "exchanged twice": exchanged_twice,
    "detach()": each(lambda p: p.grad.detach()),
    "data": each(lambda p: p.grad.data),
    "its own data": its_own_data,
    "through double": each(lambda p: p.grad.double().float()),
    "an alias, then a new group": with_a_new_group(each(lambda p: p.grad.detach())),
}
PLACED = {"weight": 0, "models": ("checkpointed",), "kinds": KINDS}


@deed(STEP, way=OTHERS, **PLACED, backward=raises("discarded, zeroed or replaced"))
def step_with_gradients_of_others(world, way):
    if world.turn:
        way(world)
    world.step(0)
    world.saved[:] = [p.grad for p in world.params()]


@deed(STEP, way=ITS_OWN, **PLACED)
def step_with_gradients_put_back(world, way):
    step_with_gradients_of_others(world, way)


OF_DTENSORS_PUT = {name: OTHERS[name] for name in ("of the step before", "exchanged")}


@deed(
    STEP,
    way=OF_DTENSORS_PUT,
    **{**PLACED, "models": ("replicated",), "kinds": ("AdamW",)},
    backward=raises("discarded, zeroed or replaced"),
)
def step_with_dtensors_of_others(world, way):
    step_with_gradients_of_others(world, way)


@deed(ALONE, backward=raises("discarded, zeroed or replaced"))
def step_with_a_gradient_of_another_model(world):
    models = [world.build() for _ in range(2)]
    optimizers = [world.wrap(sgd(model.parameters())) for model in models]
    for model in models:
        model(rows(1)).square().sum().backward()
    models[0][0].bias.grad = models[1][0].bias.grad
    for optimizer in optimizers:
        optimizer.step()
    world.see("weights", [p for model in models for p in model.parameters()])
