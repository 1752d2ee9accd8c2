# SPDX-License-Identifier: BSD-3-Clause
"""Actions between two calls of the training loop that make models, optimizers and their memory
anew: casts, copies, swapped tensors, attributes of an optimizer put back."""

import copy
import io
import pickle

import torch
from torch import nn

from programs.deed import EITHER, INDEX, deed
from programs.optimizers import has_no_attributes

CASTS = {
    "to float64 and back": (lambda m: m.double(), lambda m, dtype: m.to(dtype)),
    "half() and back": (lambda m: m.half(), lambda m, dtype: m.to(dtype)),
    "bfloat16() and back": (lambda m: m.bfloat16(), lambda m, dtype: m.to(dtype)),
    "to itself": (lambda m: m.to("cpu"), lambda m, dtype: m.to(dtype)),
    "to channels_last": (lambda m: m.to(memory_format=torch.channels_last), lambda m, dtype: m),
}


@deed("anywhere", weight=3, model=INDEX, kind=CASTS, backward=EITHER)
def cast_before_step(world, model, kind):
    chosen = world.model(model)
    dtype = next(chosen.parameters()).dtype
    cast, back = kind
    cast(chosen)
    back(chosen, dtype)


@deed(
    "anywhere",
    weight=2,
    optimizer=INDEX,
    model=INDEX,
    dtype=(torch.float64, torch.float16),
    backward=EITHER,
    stock=EITHER,
    forward=EITHER,
)
def step_in_another_dtype(world, optimizer, model, dtype):
    is_adam = isinstance(world.optimizer(optimizer), torch.optim.Adam)
    if dtype == torch.float16 and not is_adam:
        return  # as in programs.py
    chosen = world.model(model)
    before = next(chosen.parameters()).dtype
    chosen.to(dtype)
    try:
        world.step(optimizer)
    finally:
        chosen.to(before)


@deed("anywhere", weight=3, index=INDEX, keep=("the gradient", "nothing"), backward=EITHER)
def swap_tensors_before_step(world, index, keep):
    """The new tensor's gradient comes with it."""
    p = world.param(index)
    if not (p.is_leaf and p.requires_grad):
        return
    world.losses.clear()  # a graph that holds the parameter forbids it
    other = nn.Parameter(p.detach().clone())
    if keep == "the gradient" and p.grad is not None:
        other.grad = p.grad.clone()
    torch.utils.swap_tensors(p, other)


def deep_copied(together):
    return copy.deepcopy(together)


def pickled(together):
    return pickle.loads(pickle.dumps(together))


def saved_and_loaded(together):
    memory = io.BytesIO()
    torch.save(together, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


COPIES = {how.__name__: how for how in (deep_copied, pickled, saved_and_loaded)}


@deed("anywhere", weight=3, how=COPIES, step=INDEX, backward=EITHER, kinds=has_no_attributes)
def copy_before_step(world, how, step):
    """The copy has no gradients, so that its step() makes none of the updates; it is dropped,
    and the originals go on."""
    models, optimizers, extra = how((world.models, world.optimizers, world.extra))
    optimizers[step % len(optimizers)].step()
    world.see("copies", [len(o.param_groups) for o in optimizers])


@deed(
    "anywhere",
    weight=3,
    optimizer=INDEX,
    kind=("itself", "a copy", "__setstate__"),
    backward=EITHER,
)
def attributes_before_step(world, optimizer, kind):
    chosen = world.optimizer(optimizer)
    if kind == "itself":
        chosen.__dict__.update(dict(chosen.__dict__))
    elif kind == "a copy":
        chosen.__dict__.update(
            param_groups=[dict(group) for group in chosen.param_groups],
            state=copy.copy(chosen.state),
            defaults=dict(chosen.defaults),
        )
    else:
        chosen.__setstate__(chosen.__getstate__())
