# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: changing weights, gradients and state behind the optimizer's back,
and names for their memory that are held across steps."""

import torch
from common import adamw
from torch import nn

from programs.deed import ALONE, EITHER, INDEX, LAUNCHES, LEFT, deed

WHAT = ("weight", "weight", "state")


def set_data(t):
    t.data = t.data * 0.5


def write_numpy(t):
    t.detach().numpy()[...] *= 0.5


def write_slice(t):
    t.view(-1)[:1].fill_(0.25)


def write_storage(t):
    t.untyped_storage()[0] = 7


def set_item(t):
    if t.dim() and len(t):
        t[0] = 0.25


WRITES = {
    "mul_": lambda t: t.mul_(0.5),
    "add_": lambda t: t.add_(0.01),
    "zero_": lambda t: t.zero_(),
    "clamp_": lambda t: t.clamp_(-0.1, 0.1),
    "copy_": lambda t: t.copy_(t * 0.9),
    "copy_ into data": lambda t: t.data.copy_(t.detach() * 0.9),
    "mul_ of data": lambda t: t.data.mul_(0.9),
    "data =": set_data,
    "set_": lambda t: t.set_(t.detach() * 0.5),
    "slice": write_slice,
    "item": set_item,
    "numpy": write_numpy,
    "storage": write_storage,
    "foreach": lambda t: torch._foreach_mul_([t], 0.5),
    "out": lambda t: torch.mul(t, 0.5, out=t),
    "lerp_": lambda t: t.lerp_(torch.zeros_like(t), 0.3),
    "init": lambda t: nn.init.constant_(t, 0.1),
    "normal_": lambda t: t.normal_(generator=torch.Generator().manual_seed(1)),
    "index_fill_": lambda t: t.index_fill_(0, torch.tensor([0]), 1.0),
    "copy_ from the host": lambda t: t.copy_(torch.full(t.shape, 0.1, device="cpu")),
    "copy_ of ones": lambda t: t.copy_(torch.ones_like(t)),
}


@deed(weight=12, what=WHAT, index=range(2, 14), way=WRITES, product=True, forward=LAUNCHES)
@torch.no_grad()
def write(world, what, index, way):
    tensor = world.tensor(what, index)
    if tensor is not None:
        way(tensor)


OF_GRADIENTS = {name: way for name, way in WRITES.items() if name != "storage"}  # see reading.py


@deed("anywhere", weight=4, index=INDEX, way=OF_GRADIENTS, backward=EITHER, forward=LAUNCHES)
def write_a_gradient(world, index, way):
    """`data =` of a view of DDP's bucket has the reducer reduce what is in the bucket no more."""
    is_view = world.ddp is not None and world.ddp.gradient_as_bucket_view
    if not (way is set_data and is_view):
        write(world, "gradient", index, way)


def of_other_strides(p):
    made = torch.full(p.shape, 0.5, dtype=p.dtype)
    return made.t().contiguous().t() if made.dim() == 2 else made


def with_holes(p):
    wide = torch.linspace(-1, 1, 2 * p.numel(), dtype=torch.float64).to(p.dtype)
    return wide.view(*p.shape, 2)[..., 0]


GRADIENTS = {
    "None": lambda p: None,
    "ones": lambda p: torch.ones_like(p),
    "a copy of the weight": lambda p: p.detach().clone(),
    "the weight itself": lambda p: p.detach(),
    "of other strides": of_other_strides,
    "with holes": with_holes,
    "expanded": lambda p: torch.tensor(0.5, dtype=p.dtype).expand(p.shape),
    "NaN": lambda p: torch.full_like(p, float("nan")),
    "tiny": lambda p: torch.full_like(p, 1e-40),
    "of another dtype": lambda p: torch.ones(p.shape, dtype=torch.float64),
    "sparse": lambda p: torch.ones_like(p).to_sparse(),
}


@deed(weight=0)
def free_the_memory_of_gradients(world):
    """After step()."""
    for p in world.params():
        if world.mode != "backward":
            p.grad.untyped_storage().resize_(0)


@deed(weight=6, index=INDEX, kind=GRADIENTS, backward=EITHER, stock=EITHER)
@torch.no_grad()
def set_gradient(world, index, kind):
    if world.ddp is not None and kind is GRADIENTS["sparse"]:
        return  # DDP asks it for its memory, and the process ends, in stock too
    p = world.param(index)
    p.grad = kind(p)


@deed(
    weight=3,
    kind={name: GRADIENTS[name] for name in ("ones", "of other strides", "with holes")},
    backward=EITHER,
)
@torch.no_grad()
def set_all_gradients(world, kind):
    for p in world.params():
        p.grad = kind(p)


@deed(stock=EITHER, fault="lazy")
def step_with_negated_gradients(world):
    """They don't outlive it: PyTorch can't zero them, and after a backward of
    backward mode there would be nothing left to fail on."""
    for p in world.params():
        p.grad = torch._neg_view(torch.full_like(p, 0.5)) if p.requires_grad else None
    for i in range(len(world.optimizers)):
        world.step(i)
    for p in world.params():
        p.grad = None


@deed(weight=2, first=INDEX, second=INDEX, backward=EITHER)
def share_a_gradient(world, first, second):
    """Two parameters whose gradients are one memory."""
    a, b = world.param(first), world.param(second)
    if a.shape == b.shape and a.dtype == b.dtype:
        a.grad = torch.full(a.shape, 0.5, dtype=a.dtype)
        b.grad = a.grad


# ---- state


def slow_adamw(groups):
    return torch.optim.AdamW(groups, betas=(0.99999, 0.9999999), fused=True)


def spread(s):
    """The same numbers, each beside another one; a counter as it is."""
    return torch.stack((s, torch.full_like(s, 9.0)), -1)[..., 0] if s.dim() else s.clone()


def other_strides(s):
    return s.transpose(0, -1).contiguous().transpose(0, -1) if s.dim() > 1 else s.clone()


STATES = {
    "clone": lambda s: s.clone(),
    "halved": lambda s: s * 0.5,
    "zeros": lambda s: torch.zeros_like(s),
    "other strides": other_strides,
    "with holes": spread,
}
BAD_STATES = {
    "expanded": lambda s: torch.zeros((), dtype=s.dtype).expand(s.shape),
    "another dtype": lambda s: s.to(torch.float64),
}


@deed(
    weight=3,
    index=INDEX,
    kind=STATES,
    models=("mlp", "convolution in channels_last"),
    forward=LAUNCHES,
)
def replace_state(world, index, kind):
    found = world.states()
    # The reference lays such state out for all parameters at once, which is not
    # in order for those that overlap.
    if found and not (kind in (other_strides, spread) and world.overlapping):
        entry, key = found[index % len(found)]
        entry[key] = kind(entry[key])


@deed(weight=1, index=INDEX, kind=BAD_STATES, backward=EITHER, stock=EITHER, forward=EITHER)
def replace_state_badly(world, index, kind):
    replace_state(world, index, kind)


@deed(weight=1, value=(1.0, 0.9, 1e-7), make=slow_adamw, product=True)
def set_the_step_counters(world, value):
    """Stock adds 1 in float32, which rounds."""
    for entry in world.optimizer().state.values():
        entry["step"].fill_(value)


@deed(weight=1, optimizer=INDEX)
def clear_state(world, optimizer):
    world.optimizer(optimizer).state.clear()


FORGETS = {
    "the entry": lambda state, p: state.pop(p),
    "all in it": lambda state, p: state[p].clear(),
}


@deed(weight=4, optimizer=INDEX, index=INDEX, way=FORGETS)
def forget_a_parameters_state(world, optimizer, index, way):
    state = world.optimizer(optimizer).state
    keys = [p for g in world.optimizer(optimizer).param_groups for p in g["params"] if p in state]
    if keys:
        way(state, keys[index % len(keys)])


# ---- aliases

ALIASES = {
    "detached": lambda t: t.detach(),
    "data": lambda t: t.data,
    "a view": lambda t: t.detach().view(-1) if t.is_contiguous() else t.detach().t(),
    "a slice": lambda t: t.detach()[:1] if t.dim() else t.detach(),
    "an array": lambda t: t.detach().numpy(),
    "itself": lambda t: t,
    "through storage": lambda t: torch.tensor([], dtype=t.dtype).set_(t.untyped_storage()),
}


GRADIENT_ALIASES = {name: alias for name, alias in ALIASES.items() if name != "through storage"}


@deed(weight=6, what=WHAT, index=INDEX, kind=ALIASES, fault="privacy", forward=LEFT, backward=LEFT)
def hold(world, what, index, kind):
    """Looks first at those that are held since before the update."""
    world.see_held()
    tensor = world.tensor(what, index)
    if tensor is not None:
        world.held.append((what, kind(tensor)))


@deed("anywhere", weight=2, index=INDEX, kind=GRADIENT_ALIASES, backward=EITHER)
def hold_a_gradient(world, index, kind):
    hold(world, "gradient", index, kind)


@deed(ALONE, kind=ALIASES, product=True, forward=LEFT, backward=LEFT)
def hold_from_before_fuse_on(world, kind):
    model = world.build()
    alias = kind(model[0].weight)
    world.wrap(adamw(model.parameters()))
    for _ in range(4):
        world.train()
        world.see("held", torch.as_tensor(alias))


@deed(model=INDEX, forward=LEFT, backward=LEFT)
def hold_a_state_dict(world, model):
    """Looks first at those that are held since before the update."""
    world.see_held()
    for optimizer in world.optimizers:
        for entry in optimizer.state_dict()["state"].values():
            world.held += [(name, t) for name, t in entry.items() if torch.is_tensor(t)]
    for name, tensor in world.model(model).state_dict().items():
        world.held.append((name, tensor))


@deed(weight=4)
def see_what_is_held(world):
    if not any(what.startswith("gradient") for what, _ in world.held):
        world.see_held()


@deed(weight=3, backward=EITHER)
def see_all_that_is_held(world):
    world.see_held()


@deed(weight=3, index=INDEX)
@torch.no_grad()
def write_through_an_alias(world, index):
    if world.held:
        alias = world.held[index % len(world.held)][1]
        alias *= 0.5


@deed()
def drop_what_is_held(world):
    world.held.clear()
    world.losses.clear()
