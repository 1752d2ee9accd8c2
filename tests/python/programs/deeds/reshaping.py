# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: what is done to models and the memory of their parameters."""

import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from programs.deed import BATCH, EITHER, INDEX, LAUNCHES, LEFT, deed
from programs.reference import is_dense


@deed(model=INDEX, dtype=(torch.float64, torch.bfloat16), forward=LAUNCHES)
def to_another_dtype_and_back(world, model, dtype):
    chosen = world.model(model)
    before = next(chosen.parameters()).dtype
    chosen.to(dtype)
    chosen.to(before)


@deed(weight=1, model=INDEX, batch=BATCH, backward=EITHER, stock=EITHER, forward=EITHER)
def train_in_another_dtype(world, model, batch):
    chosen = world.model(model)
    before = next(chosen.parameters()).dtype
    chosen.to(torch.float64)
    world.train(lambda: world.loss(model, batch))
    chosen.to(before)


@deed(model=INDEX)
def to_channels_last(world, model):
    world.model(model).to(memory_format=torch.channels_last)


@deed(weight=3, index=INDEX, kind=("same strides", "other strides", "a slice"))
def new_data(world, index, kind):
    p = world.param(index)
    if kind == "a slice":
        p.data = torch.cat([p.data.reshape(-1), p.data.new_ones(3)])[: p.numel()].view(p.shape)
    elif kind == "other strides" and p.dim() == 2 and not world.overlapping:
        p.data = p.data.t().contiguous().t()
    else:
        p.data = p.data.clone()


def alike(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and is_dense(a) and is_dense(b)


@deed(first=INDEX, second=INDEX)
def exchange_data(world, first, second):
    """Two parameters swap their memory, one after the other."""
    a, b = world.param(first), world.param(second)
    if a is not b and alike(a, b):
        a.data, b.data = b.data, a.data


@deed(weight=1, first=INDEX, second=INDEX)
def tie_data(world, first, second):
    """Contiguous, as their state is: two parameters in one memory are updated one after the other,
    which the reference does not do with tensors that it has to lay out anew."""
    a, b = world.param(first), world.param(second)
    if alike(a, b) and a.is_contiguous() and b.is_contiguous():
        a.data = b.data
        world.overlapping = True


@deed(index=INDEX, forward=LAUNCHES)
def swap_tensors(world, index):
    p = world.param(index)
    if p.is_leaf and p.requires_grad:
        world.losses.clear()  # a graph that holds the parameter forbids it
        torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 0.5))


@deed(weight=1, forward=LAUNCHES)
def apply_under_swap_mode(world):
    world.optimizer().zero_grad()
    world.losses.clear()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        world.model()._apply(lambda t: t * 0.5)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@deed(model=INDEX, forward=LEFT, backward=LEFT)
def vector_to_parameters(world, model):
    """All parameters become views of one memory."""
    params = list(world.model(model).parameters())
    vector = nn.utils.parameters_to_vector(params).detach() * 0.75
    nn.utils.vector_to_parameters(vector, params)


@deed(weight=1, index=INDEX)
def share_memory(world, index):
    """The memory moves; an array over the old one would be left dangling."""
    world.held.clear()
    world.param(index).share_memory_()


def plain_linear(world, index):
    found = [m for m in world.modules() if isinstance(m._parameters.get("weight"), nn.Parameter)]
    found = [m for m in found if not parametrize.is_parametrized(m)]
    return found[index % len(found)] if found else None


@deed(index=INDEX, forward=LAUNCHES)
def prune_a_layer(world, index):
    layer = plain_linear(world, index)
    if layer is not None:
        prune.l1_unstructured(layer, "weight", 0.3)


@deed(weight=1)
def make_pruning_permanent(world):
    for module in world.modules():
        if "weight_orig" in module._parameters:
            prune.remove(module, "weight")


class Halved(nn.Module):
    def forward(self, weight):
        return weight * 0.5


@deed(index=INDEX)
def parametrize_a_layer(world, index):
    layer = plain_linear(world, index)
    if layer is not None:
        parametrize.register_parametrization(layer, "weight", Halved())


@deed(weight=1)
def end_parametrizations(world):
    for module in world.modules():
        if parametrize.is_parametrized(module):
            parametrize.remove_parametrizations(module, "weight")


@deed(weight=1, model=INDEX)
@torch.no_grad()
def reset_parameters(world, model):
    torch.manual_seed(9)
    for module in world.model(model).modules():
        if hasattr(module, "reset_parameters") and not parametrize.is_parametrized(module):
            module.reset_parameters()
