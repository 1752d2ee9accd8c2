# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: optfuse.clip_grad_norm_(), which for stock optimizers is torch's."""

import copy
import gc
import math
import os
import pickle
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch
from common import adamw
from torch import nn

import optfuse
from optfuse._clipping import torch_functions
from optfuse._library.bindings import lib
from programs.deed import ALONE, BACKWARD, BATCH, BOOL, EITHER, INDEX, STEP, deed, elsewhere, raises
from programs.deeds.keeping import go_on_with_deepcopies
from programs.deeds.reading import READS, saved
from programs.deeds.training import step_with_closure
from programs.deeds.tuning import add_a_group, flush, flush_everything
from programs.deeds.writing import GRADIENTS, OF_GRADIENTS
from programs.models import numbers
from programs.optimizers import has_closure, has_no_attributes

OVER = {
    "optimizer": lambda world, i: world.optimizer(i),
    "parameters": lambda world, i: world.params(),
    "parameters of a model": lambda world, i: world.model(i).parameters(),
    "one parameter": lambda world, i: world.param(i),
    "one of them twice": lambda world, i: [*world.params(), world.param(i)],
}
ORDERS = (2.0, 2.0, 2.0, 1.0, float("inf"))
NORMS = (0.05, 0.05, 0.0, 1e4)  # the last one leaves gradients as they are


@deed(
    "anywhere",
    weight=4,
    over=OVER,
    index=INDEX,
    max_norm=NORMS,
    order=ORDERS,
    foreach=(None, None, False),
    strict=(False, False, True),
    backward=EITHER,
)
def clip_by_optfuse(world, over, index, max_norm, order, foreach, strict):
    norm = optfuse.clip_grad_norm_(over(world, index), max_norm, order, strict, foreach)
    world.see("norm", norm)


@deed(
    weight=5,
    model=INDEX,
    batch=BATCH,
    over=OVER,
    times=(1, 1, 2),
    max_norm=NORMS,
    order=ORDERS,
    look=(False, False, True),
    set_to_none=BOOL,
    backward=EITHER,
)
def clipped_by_optfuse(world, model, batch, over, times, max_norm, order, look, set_to_none):
    for optimizer in world.optimizers:
        optimizer.zero_grad(set_to_none)
    world.backward(world.loss(model, batch))
    for _ in range(times):
        clip_by_optfuse(world, over, model, max_norm, order, None, False)
        max_norm *= 0.5
    if look:
        world.see("gradients", [p.grad for p in world.params()])
    for i in range(len(world.optimizers)):
        world.step(i)


@deed(weight=2, model=INDEX, batch=BATCH, over=OVER, backward=EITHER)
def clipped_before_more_is_added(world, model, batch, over):
    """Gradients that a later pass adds are not clipped."""
    world.backward(world.loss(model, batch))
    clip_by_optfuse(world, over, model, 0.05, 2.0, None, False)
    world.backward(world.loss(model, batch + 1))
    for i in range(len(world.optimizers)):
        world.step(i)


# ---- whatever happens to clipped gradients

HALF = {
    "in place": lambda p: p.grad.mul_(0.5),
    "through .data": lambda p: p.grad.data.mul_(0.5),
    "by another one": lambda p: setattr(p, "grad", p.grad * 0.5),
    "by other data": lambda p: setattr(p.grad, "data", torch.full_like(p, 0.25)),
    "by none": lambda p: setattr(p, "grad", None),
}


def gradients(world):
    return [p.grad for p in world.params()]


def clip(world, max_norm=0.01):
    world.see("norm", optfuse.clip_grad_norm_(world.params(), max_norm))


def clip_with_torch(world):
    world.see("norm", nn.utils.clip_grad_norm_(world.params(), 0.01))
    nn.utils.clip_grad_value_(world.params(), 1e-3)


def clip_with_an_alias(world):
    aliases = [grad.detach() for grad in gradients(world)]
    clip(world)
    world.see("aliases", aliases)


def flush_both(world):
    flush(world, 0)
    flush_everything(world)


def step(world):
    for i in range(len(world.optimizers)):
        world.step(i)


def step_and_use(world):
    step(world)
    world.see("output", world.loss(0, 3))


def step_and_clip(world):
    step(world)
    clip(world)


def look_in_another_thread(world):
    elsewhere(lambda: world.see("gradients", gradients(world)))


def look_in_a_forked_child(world):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, pickle.dumps([grad.tolist() for grad in gradients(world)]))
        os._exit(0)
    os.waitpid(child, 0)
    world.see("gradients", pickle.loads(os.read(read, 1 << 16)))


ACTS = {
    **{act.__name__: act for act in (look_in_another_thread, look_in_a_forked_child)},
    "look": lambda world: world.see("gradients", gradients(world)),
    "norms": lambda world: world.see("norms", [grad.norm() for grad in gradients(world)]),
    "clip": clip,
    "add": lambda world: world.backward(world.loss(0, 5)),
    "zero": lambda world: world.optimizer().zero_grad(set_to_none=False),
    "copy": lambda world: world.see("copies", copy.deepcopy(gradients(world))),
    "save": lambda world: world.see("saved", saved(gradients(world))),
    "another group": lambda world: add_a_group(world, 0, 3),
    **{act.__name__: act for act in (clip_with_torch, clip_with_an_alias, flush_both)},
    **{act.__name__: act for act in (step, step_and_use, step_and_clip)},
    **{
        f"half {name}": lambda world, way=way: [way(p) for p in world.params()]
        for name, way in HALF.items()
    },
    **{
        f"read, {name}": lambda world, way=way: world.see("read", way(world.grad()))
        for name, way in READS.items()
    },
    **{
        f"write, {name}": lambda world, way=way: way(world.grad())
        for name, way in OF_GRADIENTS.items()
        if name != "data ="  # half by other data
    },
}
REFUSED = raises("clipping", "parameter 0 of group 0", "backward mode")


@deed(STEP, weight=0, act=ACTS, backward=REFUSED, fault="factors")
def clip_act_and_step(world, act):
    clip(world, 0.05)
    act(world)
    step(world)


@deed(STEP, weight=0, act=ACTS, backward=REFUSED, fault="factors")
def clip_step_and_act(world, act):
    clip(world, 0.05)
    step(world)
    act(world)
    world.see("gradients", gradients(world))


# ---- Forward(max_grad_norm=)

MAX_NORM = {"setup": {"max_grad_norm": 0.05}, "backward": raises("has no max_grad_norm=")}


@deed(**MAX_NORM, looks=BOOL)
def iterations_with_max_grad_norm(world, looks):
    for _ in range(2):
        world.train()
        if looks:
            world.see("gradients", gradients(world))


@deed(**MAX_NORM, kinds=has_closure)
def max_grad_norm_with_a_closure(world):
    step_with_closure(world, 0, 0, 3)


@deed(**MAX_NORM, kinds=has_no_attributes)
def max_grad_norm_in_copies(world):
    go_on_with_deepcopies(world)
    step_with_closure(world, 0, 0, 4)


# ---- by any function, of any gradients


def in_two_calls(params, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
    found = [p.grad for p in params if p.grad is not None]
    norm = nn.utils.get_total_norm(found, norm_type, error_if_nonfinite, foreach)
    nn.utils.clip_grads_with_norm_(params, max_norm, norm, foreach)
    return norm


BY = {
    "ours": lambda *a, **k: optfuse.clip_grad_norm_(*a, **k),
    "torch's": lambda *a, **k: nn.utils.clip_grad_norm_(*a, **k),
    "imported before": torch_functions.stock_clip_grad_norm_,
    "in two calls": in_two_calls,
}
USUAL = 16384  # smaller gradients are multiplied at once
CLIPPED = {"where": STEP, "weight": 0, "backward": EITHER, "by": BY}


@deed(
    **CLIPPED,
    max_norm=(0.05, 1e9, 0.0, math.inf, math.nan),
    norm_type=(2.0, 1, 3, 0, 0.5, math.inf, -math.inf, "inf"),
    foreach=(None, True, False),
    error=BOOL,
    at_once=BOOL,
    kinds=("AdamW",),
    models=("long", "mlp in float64", "mlp in bfloat16", "mlp in float16", "four dtypes",
            "a number beside float64", "one storage"),
    stock=EITHER,
    every=True,
)  # fmt: skip
def clip_and_step(world, by, max_norm, norm_type, foreach, error, at_once):
    lib.of_shim_wait_from(USUAL if at_once else 0)
    world.see("norm", by(world.params(), max_norm, norm_type, error, foreach))
    step(world)
    world.see("gradients", gradients(world))


LIMITS = {"a word": "0.05", "a tensor": torch.tensor(0.05), "below zero": -1.0}
#: Those that our function takes as well.
NUMBERS = {
    repr(one): one
    for one in (np.float32(0.25), np.float64(0.25), np.int64(1), Fraction(1, 4), Decimal("0.25"),
                torch.tensor([0.25]), np.array(0.25), 1, -0.0)
}  # fmt: skip


@deed(STEP, weight=0, by=("ours", "torch's"), max_norm=NUMBERS, product=True, kinds=("AdamW",),
      backward=EITHER)  # fmt: skip
def clip_by_a_number_of_any_type(world, by, max_norm):
    world.see("norm", BY[by](world.params(), max_norm))
    step(world)


TYPES = {repr(one): one for one in (np.float64(2), Fraction(3), torch.tensor(2.0), np.float32(1))}


@deed(STEP, weight=0, norm_type=TYPES, kinds=("AdamW",), backward=EITHER)
def clip_by_a_norm_of_any_type(world, norm_type):
    world.see("norm", optfuse.clip_grad_norm_(world.params(), 0.05, norm_type))
    step(world)


@deed(STEP, weight=0, max_norm=LIMITS, kinds=("AdamW",), backward=EITHER)
def clip_by_an_odd_number(world, max_norm):
    world.see("norm", nn.utils.clip_grad_norm_(world.params(), max_norm))
    step(world)
    world.see("gradients", gradients(world))


ODD = {name: GRADIENTS[name] for name in ("of other strides", "with holes", "expanded", "NaN",
                                          "tiny")}  # fmt: skip
ODD |= {
    "a part of another": lambda p: torch.ones(2, *p.shape)[1],
    "negated": lambda p: torch._neg_view(torch.ones_like(p)),
    "from NumPy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "infinite": lambda p: torch.full_like(p, math.inf),
    "zero": torch.zeros_like,
    "huge": lambda p: torch.full_like(p, 1e30),
}


@deed(
    **CLIPPED,
    kind=ODD,
    max_norm=(1e-3, 1e4),
    error=BOOL,
    product=True,
    kinds=("AdamW", "SGD", "RMSprop"),
    stock=EITHER,
)
def clip_an_odd_gradient(world, by, kind, max_norm, error):
    """Stock multiplies by 1, too, and clips none of them if one can't be multiplied."""
    world.param(2).grad = kind(world.param(2))
    try:
        world.see("norm", by(world.params(), max_norm, 2.0, error, False))
    except RuntimeError as raised:
        if isinstance(raised, optfuse.Error):
            raise
        world.see("error", str(raised))
        world.param(2).grad = torch.ones_like(world.param(2))
    if not world.fused:
        world.param(2).grad = world.param(2).grad.contiguous().resolve_neg()
    step(world)
    world.see("gradients", gradients(world))


@deed(**CLIPPED, setup={"optimizers": [{"kind": "AdamW", "over": "even"}]})
def clip_parameters_that_nobody_has_fused(world, by):
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    world.see("norm", by([frozen, *world.params()], 0.05))
    step(world)
    world.see("gradients", gradients(world))
    world.model().zero_grad()


TWICE = [{"kind": "AdamW"}, {"kind": "SGD"}]


@deed(**{**CLIPPED, "backward": raises("already")}, setup={"optimizers": TWICE})
def clip_for_two_optimizers(world, by):
    world.see("norm", by(world.params(), 0.05))
    step(world)


@deed(**CLIPPED)
def clip_gradients_that_share_memory(world, by):
    """They are views of one buffer, and one tensor twice."""
    params = world.params()
    flat = torch.linspace(-1, 1, sum(p.numel() for p in params))
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = part.view_as(p)
    world.see("norm", by([*params, params[0]], 0.05))
    step(world)
    world.see("buffer", flat)


@deed(BACKWARD, weight=0, by=BY, backward=raises("create_graph=True"))
def clip_gradients_of_a_graph(world, loss, by):
    world.backward(loss, create_graph=True)
    world.see("norm", by(world.params(), 0.05))
    for p in world.params():
        p.grad = p.grad.detach()


ENDS = ("unfuse", "delete", "step and delete")


@deed(ALONE, setup={"wait_from": 0}, end=ENDS, backward=REFUSED, proves=False)
def clipped_gradients_outlive_their_optimizer(world, end):
    _, optimizer = world.own(make=adamw)
    world.train()
    optimizer.zero_grad()
    world.backward(world.loss(0, 1))
    clip(world)
    if end == "unfuse" and world.fused:
        optfuse.unfuse(optimizer)
    elif end == "step and delete":
        optimizer.step()
    if end != "unfuse":
        del optimizer
        world.optimizers.clear()
        gc.collect()
    world.see("gradients", gradients(world))


@deed(ALONE, by=BY, proves=False, backward=EITHER)
def clip_a_gradient_that_an_update_will_change(world, by):
    """Its memory is another parameter's, and no operator has seen it since step()."""
    p, q = (nn.Parameter(numbers(i, 4)) for i in range(2))
    optimizers = [world.wrap(torch.optim.SGD([x], lr=1.0, fused=True)) for x in (p, q)]
    q.grad = torch.full((4,), 30.0)
    optimizers[1].step()
    p.grad = q.data
    world.see("norm", by([p], 0.5))
    world.see("gradient", p.grad)


@deed(
    STEP,
    weight=0,
    limit=(1e-3, 0.0, -0.0),
    foreach=(None, False),
    backward=EITHER,
    kinds=("AdamW", "SGD"),
)
def clip_values_and_step(world, limit, foreach):
    """Zeros of both signs are clipped to zero, too."""
    for p in world.params():
        p.grad.view(-1)[::3], p.grad.view(-1)[1::3] = 0.0, -0.0
    nn.utils.clip_grad_value_(world.params(), limit, foreach=foreach)
    step(world)
    world.see("gradients", gradients(world))


@deed(ALONE, setup={"wait_from": 0}, backward=EITHER)
def clip_by_several_threads(world):
    model = world.build("long")
    world.wrap(adamw(model.parameters()))
    torch.set_num_threads(3)
    try:
        for i in range(2):
            world.optimizer().zero_grad()
            world.backward(model(numbers(i, 300, 4)).square().mean())
            clip(world)
            step(world)
    finally:
        torch.set_num_threads(1)
    world.look()
