# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: averages of weights, updated after each step()."""

import copy
import functools
import gc

import torch
from averaged import KINDS, averages_of
from on_device import DEVICE
from torch import nn
from torch.optim import swa_utils

from programs.deed import ALONE, BOOL, deed, elsewhere, raises
from programs.deeds.reading import READS, saved
from programs.deeds.training import CLIPPING, scaled
from programs.deeds.tuning import SCHEDULERS


def halved(averages, weights, n):
    swa_utils.get_ema_multi_avg_fn(0.9)(averages, [weight * 0.5 for weight in weights], n)


# Averages that are left to PyTorch's own function.
OTHERS = {
    "a function": lambda: {"avg_fn": lambda average, weight, _: 0.8 * average + 0.2 * weight},
    "EMA in a wrapper": lambda: {
        "multi_avg_fn": functools.wraps(swa_utils.get_ema_multi_avg_fn(0.9))(halved)
    },
    "a tensor for decay": lambda: {
        "multi_avg_fn": swa_utils.get_ema_multi_avg_fn(torch.tensor(0.9))
    },
}
LOOKS = {
    "state_dict": lambda world, a: dict(a.state_dict()),
    "torch.save": lambda world, a: dict(saved(a.state_dict())),
    "deepcopy": lambda world, a: [*copy.deepcopy(a).parameters()],
    "a forward pass": lambda world, a: world.loss(0, 1, a),
    "a write": lambda world, a: nn.init.constant_(a.module[2].weight, 0.5),
    "a version": lambda world, a: a.module[0].weight._version,
    "bytes": lambda world, a: list(bytes(a.module[0].weight.untyped_storage())),
    **{
        f"{name} of a weight": lambda world, a, way=way: way(a.module[0].weight)
        for name, way in READS.items()
    },
}
WITH_KERNELS = ("AdamW", "SGD", "RMSprop", "Lion")
OF_16_BITS = ("mlp in bfloat16", "mlp in float16")


def iterations_with_an_average(world, kind, launches=False, **options):
    """Yields the average after each iteration."""
    average = swa_utils.AveragedModel(world.model(), **options, **{**KINDS, **OTHERS}[kind]())
    for _ in range(3):
        world.train()
        if launches:
            world.see("a weight", world.param(1).sum())
        average.update_parameters(world.model())
        yield average
    world.see("average", dict(average.state_dict()))


@deed(kind=(*KINDS, *OTHERS), use_buffers=BOOL, kinds=WITH_KERNELS, models=("mlp", "batch norm"))
def train_with_an_average(world, kind, use_buffers):
    before = averages_of(world.optimizer()) if world.mode == "forward" else 0
    for _ in iterations_with_an_average(world, kind, use_buffers=use_buffers):
        pass
    if world.mode == "forward" and world.kinds == ["mlp"] and world.tested and not DEVICE:
        made = averages_of(world.optimizer()) - before
        assert made == (0 if kind in OTHERS else 2 * len(world.params()))


@deed(weight=0, kind=tuple(KINDS), kinds=("AdamW",), models=("mlp in float64", *OF_16_BITS, "odd"))
def average_of_other_weights(world, kind):
    for _ in iterations_with_an_average(world, kind):
        pass


OTHER_KINDS = ("RAdam", "NAdam", "Rprop", "Adafactor")


@deed(
    weight=0,
    launches=BOOL,
    kinds=OTHER_KINDS,
    models=("mlp", "tied", "layer norm"),
    proves=False,
)
def average_by_other_kinds(world, launches):
    for _ in iterations_with_an_average(world, "EMA", launches):
        pass


@deed(weight=0, fault="average_alias")
def alias_of_an_average(world):
    array = None
    for average in iterations_with_an_average(world, "EMA"):
        if array is None:
            array = average.module[0].weight.detach().numpy()
        world.see("array", torch.from_numpy(array.copy()))


@deed(weight=0, kind=("EMA", "EMA one by one"), look=LOOKS)
def look_at_an_average(world, kind, look):
    for average in iterations_with_an_average(world, kind):
        world.see("look", look(world, average))


@deed(weight=0, kind=tuple(KINDS), other=tuple(KINDS))
def averages_of_one_model_and_of_an_average(world, kind, other):
    second = swa_utils.AveragedModel(world.model(), **KINDS[other]())
    for average in iterations_with_an_average(world, kind):
        second.update_parameters(world.model())
        second.update_parameters(average.module)
    world.see("second", dict(second.state_dict()))


@deed(weight=0, kind=tuple(KINDS))
def train_from_an_average(world, kind):
    *_, average = iterations_with_an_average(world, kind)
    with torch.no_grad():
        for p, q in zip(world.params(), average.parameters(), strict=True):
            p.copy_(q)


@deed(weight=0)
def average_in_another_dtype(world):
    average = swa_utils.AveragedModel(world.model(), **KINDS["EMA one by one"]()).double()
    for _ in range(3):
        world.train()
        average.update_parameters(world.model())
    world.see("average", dict(average.state_dict()))


# ---- large weights, and other features beside averages


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@deed(ALONE, kind=KINDS, dtype=DTYPES, product=True)
def average_of_wide_weights(world, kind, dtype):
    """PyTorch's operator shares large tensors out among threads."""
    torch.set_num_threads(2)
    world.kinds, world.models = ["mlp"], [nn.Linear(4, 8221).to(dtype)]
    world.wrap(torch.optim.AdamW(world.params(), fused=True))
    average = swa_utils.AveragedModel(world.model(), **kind())
    for _ in range(3):
        world.train()
        average.update_parameters(world.model())
    torch.set_num_threads(1)
    world.see("average", dict(average.state_dict()))


@deed(ALONE)
def average_of_little_decay(world):
    """At a decay of 0 PyTorch's lerp has another zero in its tails, also between two threads."""
    torch.set_num_threads(2)
    p = nn.Parameter(torch.full((40011,), -0.0))
    optimizer, model = world.wrap(torch.optim.SGD([p], lr=0.1, fused=True)), nn.ParameterList([p])
    options = {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.0)}
    average = swa_utils.AveragedModel(model, **options)
    for _ in range(3):
        p.grad = torch.zeros(40011)
        optimizer.step()
        average.update_parameters(model)
    torch.set_num_threads(1)
    world.see("average", average.module[0].view(torch.int32))


@deed(weight=0, kinds=WITH_KERNELS, backward=raises("scaled by GradScaler.scale()"))
def average_with_clipping_scaling_and_a_scheduler(world):
    scheduler = SCHEDULERS["CosineAnnealingLR"](world.optimizer())
    average = swa_utils.AveragedModel(world.model(), **KINDS["EMA"]())
    for _ in range(4):
        scaled(world, 0, world.i, True, CLIPPING["torch"], False)
        scheduler.step()
        average.update_parameters(world.model())
    world.see("average", dict(average.state_dict()))


@deed(weight=0)
def another_thread_sees_an_average(world):
    for average in iterations_with_an_average(world, "EMA"):
        see = functools.partial(world.see, "average", [*average.parameters()])
        elsewhere(see)


@deed(ALONE, proves=False)
def average_that_outlives_the_optimizer(world):
    model, _ = world.own()
    average = swa_utils.AveragedModel(model, **KINDS["EMA"]())
    for _ in range(2):
        world.train()
        average.update_parameters(model)
    world.optimizers.clear()
    gc.collect()
    world.see("average", dict(average.state_dict()))
