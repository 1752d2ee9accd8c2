# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: clipping by norms that nobody has computed, of gradients that are promises."""

import copy
import gc
import math
import os
import pickle
from collections import Counter

import torch
from torch import nn

import optfuse
from programs.deed import BATCH, BOOL, EITHER, deed, elsewhere
from programs.deeds.clipping import BY
from programs.deeds.reading import READS
from programs.models import PROMISED

#: Outcomes of clips of promises, since the process began.
OUTCOMES = Counter()
SCREENED, FOR_THE_CLIP = "screened", "made for the clip"
FOR_A_LOOK, AT_LAUNCH = "made for a look", "number at launch"

#: max_norm is so many times the norm.
NEAR = {
    repr(times): times
    for times in (
        *(1 - 1e-6, 1.0, 1 + 1e-7, 1 + 1e-6, 1 + 2e-6, 1 + 4e-6, 1 + 1e-5, 1 + 1e-4, 1.01),
        *(0.0, 0.3, 2.0, 10.0, 1e6, math.inf, math.nan),
    )
}
ORDERS = (*(2.0,) * 12, 2, 1, 3, math.inf, "inf")
SPOILED = {"": None, **{repr(one): one for one in (math.nan, math.inf, 1e20, 1e-20, 1e-30)}}


def counted(world):
    """Promises: those that were made so far, and those that nobody has computed or used."""
    layers = [layer for summary in world.summaries() for layer in summary.promised]
    made = sum(layer.made for layer in layers)
    return made, sum(layer.promised - layer.panels for layer in layers) - made


def in_another_thread(norm):
    return elsewhere(norm.item)


def in_a_forked_child(norm):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, pickle.dumps(norm.item()))
        os._exit(0)
    os.waitpid(child, 0)
    return pickle.loads(os.read(read, 1 << 16))


LOOKS = {
    "item": lambda norm: norm.item(),
    "print": lambda norm: f"{norm}",
    "float": float,
    "isfinite": lambda norm: [torch.isfinite(norm), norm.isfinite().item()],
    "detach": lambda norm: norm.detach().add(1),
    "clone": lambda norm: norm.clone(),
    "compare": lambda norm: bool(norm > 1.0),
    "stack": lambda norm: torch.stack([norm, norm]),
    "NumPy": lambda norm: float(norm.numpy()),
    "deepcopy": lambda norm: copy.deepcopy(norm),
    "pickle": lambda norm: pickle.loads(pickle.dumps(norm)),
    "write": lambda norm: norm.mul_(2),
    "data": lambda norm: norm.data * 2,
    "storage": lambda norm: list(norm.untyped_storage()),
    "another thread": in_another_thread,
    "a forked child": in_a_forked_child,
    **{f"{name} of the norm": read for name, read in READS.items()},
}
#: When the norm is looked at, if at all.
WHEN = ("never", "never", "before step()", "after step()", "after zero_grad()", "without step()",
        "after the next forward pass", "when gradients have changed", "at the end")  # fmt: skip


def look(world, norm, how):
    made, _ = counted(world)
    world.see("norm", how(norm))
    OUTCOMES[FOR_A_LOOK] += counted(world)[0] > made


def clip(world, by, *args):
    made, waiting = counted(world)
    norm = by(world.params(), *args)
    is_made = counted(world)[0] > made
    if world.fused and waiting > 0:
        OUTCOMES[FOR_THE_CLIP if is_made else SCREENED] += 1
    return norm, world.fused and waiting > 0 and not is_made


def norm_of(world, loss):
    """The norm of the gradients to come."""
    used = [p for p in world.params() if p.requires_grad]
    found = torch.autograd.grad(loss, used, allow_unused=True)
    return nn.utils.get_total_norm([g.float() for g in found if g is not None]).item()


def backward(world, batch, spoiled, passes):
    for i in range(passes):
        value = world.loss(0, batch + i)
        world.backward(value if spoiled is None else value * spoiled)


def do_before_step(world, norm, when, how):
    if when == "before step()":
        look(world, norm, how)
    elif when == "when gradients have changed":
        for p in world.params():
            p.grad.mul_(0.5)
        look(world, norm, how)
    elif when == "without step()":
        world.optimizer().zero_grad()
        look(world, norm, how)


def do_after_step(world, norm, when, how, is_late):
    if when == "after zero_grad()":
        world.optimizer().zero_grad()
    if when == "after the next forward pass":
        world.see("loss", world.loss(0, 5))
        made, _ = counted(world)
        OUTCOMES[AT_LAUNCH] += is_late
    if when.startswith("after"):
        look(world, norm, how)


@deed(
    weight=0,
    models=tuple(PROMISED),
    kinds=("AdamW", "Adagrad"),  # with stock's bits in 16 bits, too
    by=BY,
    near=NEAR,
    order=ORDERS,
    error=BOOL,
    batch=BATCH,
    spoiled=SPOILED,
    passes=(1, 1, 1, 2),
    when=WHEN,
    how=LOOKS,
    backward=EITHER,
    stock=EITHER,
    proves=False,
)
def clip_near_the_norm(world, by, near, order, error, batch, spoiled, passes, when, how):
    """Whether gradients are computed for a clip depends on a bound of their norm."""
    world.optimizer().zero_grad()
    max_norm = near * norm_of(world, world.loss(0, batch)) * (spoiled or 1.0)
    backward(world, batch, spoiled, passes)
    before = [p.grad._version for p in world.params()]
    try:
        norm, is_late = clip(world, by, max_norm, order, error)
    except RuntimeError as raised:
        if isinstance(raised, optfuse.Error):
            raise
        world.see("error", str(raised))
        return
    after = [p.grad._version for p in world.params()]
    world.see("versions", [n - m for n, m in zip(after, before, strict=True)])
    world.see("form", [str(norm.dtype), str(norm.device), list(norm.shape), norm.requires_grad])
    if when == "at the end":
        world.held.append(("norm", norm))
    do_before_step(world, norm, when, how)
    if when != "without step()":
        world.step(0)
        do_after_step(world, norm, when, how, is_late)


@deed(weight=0, models=("promised",), kinds=("AdamW",), fault="norm_bound", backward=EITHER)
def clip_by_a_little_less_than_the_norm(world):
    """A bound that is too small leaves gradients as they are."""
    world.optimizer().zero_grad()
    max_norm = 0.5 * norm_of(world, world.loss(0, 1))
    world.backward(world.loss(0, 1))
    nn.utils.clip_grad_norm_(world.params(), max_norm)
    world.step(0)


@deed(weight=0, models=("promised",), kinds=("AdamW",), backward=EITHER)
def norms_in_a_list(world):
    norms = []
    for i in range(4):
        world.optimizer().zero_grad()
        world.backward(world.loss(0, i))
        norms.append(nn.utils.clip_grad_norm_(world.params(), 1e6))
        if i != 1:
            world.step(0)
    world.see("norms", torch.stack(norms))


@deed(weight=0, models=("promised",), kinds=("AdamW",), backward=EITHER)
def norm_that_outlives_its_model(world):
    model = copy.deepcopy(world.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if world.fused:
        with world.environment(OPTFUSE_PRODUCTS="force"):
            optimizer = optfuse.fuse(optimizer, mode=world.mode)
    for is_stepped in (False, True):
        model(torch.ones(3, 4)).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        if is_stepped:
            optimizer.step()
    del model, optimizer
    gc.collect()
    world.see("norm", norm)
