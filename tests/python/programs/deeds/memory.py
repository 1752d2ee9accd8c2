# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: where tensors lie, and who else has their memory. An update finds most of its inputs as
its last one has left them, and sees what has changed in between."""

import ctypes
import gc

import numpy as np
import torch
from common import adamw, sgd
from torch import nn
from torch.utils.dlpack import to_dlpack

import optfuse
from programs.deed import ALONE, BEFORE_STEP, BOOL, DIFFERS, EITHER, EQUAL, LEFT, STEP, deed
from programs.models import numbers


def transposed(t):
    t.data = t.data.t()


def with_holes(t):
    wide = torch.full((t.shape[0], 2 * t.shape[1]), 9.0)
    wide[..., ::2] = t.detach()
    t.data = wide[..., ::2]


def in_other_memory(t):
    t.data = t.detach().clone()


def in_more_memory(t):
    storage = t.untyped_storage()
    storage.resize_(storage.nbytes() * 2)


def in_foreign_memory(t):
    t.data = torch.frombuffer(bytearray(t.detach().numpy().tobytes()), dtype=t.dtype).view(t.shape)


def in_one_buffer(p, entry):
    both = torch.stack([entry["exp_avg"], entry["exp_avg_sq"]])
    entry["exp_avg"].data, entry["exp_avg_sq"].data = both.unbind()


def with_a_wide_counter(p, entry):
    entry["step"].data = entry["step"].double()


def of_parameter(change):
    return lambda p, entry: change(p)


def of_state(name, change):
    return lambda p, entry: change(entry[name])


LIES = {
    "parameter transposed": of_parameter(transposed),
    "parameter with holes": of_parameter(with_holes),
    "parameter in other memory": of_parameter(in_other_memory),
    "parameter in foreign memory": of_parameter(in_foreign_memory),
    "parameter in shared memory": of_parameter(torch.Tensor.share_memory_),
    "state transposed": of_state("exp_avg", transposed),
    "state with holes": of_state("exp_avg_sq", with_holes),
    "state in other memory": of_state("exp_avg", in_other_memory),
    "state in foreign memory": of_state("exp_avg", in_foreign_memory),
    "storage of the state resized": of_state("exp_avg_sq", in_more_memory),
    "state in one buffer": in_one_buffer,
    "step counter in float64": with_a_wide_counter,
}


@deed(weight=0, kinds=("AdamW",), models=("recurrent",), change=LIES, turns=1)
def change_where_tensors_lie(world, change):
    p = world.param(0)  # square
    if world.fused:
        optfuse.flush(world.optimizer())
    change(p, world.optimizer().state[p])


@deed(weight=1, kinds=("SGD",))
def momentum_comes_and_goes(world):
    for group in world.optimizer().param_groups:
        group["momentum"] = 0.9 if world.turn else 0.0


@deed(ALONE, dtype=(torch.float32, torch.float64))
def parameter_becomes_one_of_another_size(world, dtype):
    p = nn.Parameter(torch.ones(4))
    optimizer = world.wrap(adamw([p]))
    for i in range(6):
        if i == 3:
            p.grad, p.data = None, torch.full((9,), 0.5, dtype=dtype)
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[p][name].data = torch.full((9,), 0.1, dtype=dtype)
        p.grad = torch.full_like(p, i + 1)
        optimizer.step()
    world.see("parameter", p)
    world.see("state", dict(optimizer.state[p]))


@deed(ALONE, dtype=(torch.float64, torch.float32))
def counter_that_is_refused(world, dtype):
    """The next update looks at everything: nothing was found out about its parameter yet."""
    p = nn.Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = world.wrap(adamw([p]))

    def iterate():
        optimizer.zero_grad()
        p.square().sum().backward()
        optimizer.step()

    for i in range(6):
        if i == 3:
            world.launch()
            for tensor in (p, *optimizer.state[p].values()):
                tensor.data = tensor.detach().to(tensor.dtype if tensor.dim() == 0 else dtype)
            counter = optimizer.state[p]["step"]
            before = counter.clone()
            for number in (-3.0, float("nan")):
                counter.fill_(number if world.fused else before)
                world.refused(iterate, "bad inputs of an update", way_out="")
            counter.copy_(before)
        iterate()
    world.see("weights", p)
    world.see("state", dict(optimizer.state[p]))


@deed(ALONE)
def holes_beside_a_parameter_that_comes_late(world):
    """step() gives up and is called again when the state has been made."""
    holes = nn.Parameter(numbers(1, 5, 8)[:, ::2])
    late = nn.Parameter(numbers(2, 3))
    optimizer = world.wrap(adamw([holes, late]))
    for i in range(4):
        optimizer.zero_grad()
        (holes.square().sum() + (late.sum() if i >= 2 else 0)).backward()
        optimizer.step()
    world.see("weights", [holes, late])


@deed(ALONE, proves=False)
def holes_beside_a_gradient_at_which_step_raises(world):
    holes, other = params = [nn.Parameter(torch.ones(5, 8)[:, ::2]), nn.Parameter(torch.ones(3))]
    optimizer = world.wrap(sgd(params))
    sum(p.sum() for p in params).backward()
    optimizer.step()
    other.grad = torch.ones(3).to_sparse()
    world.refused(optimizer.step, "nothing was updated", way_out="")
    world.see("weight", holes)


# ---- memory that another library has


GIVEN = {
    "from_dlpack": lambda t: torch.from_dlpack(t.detach()),
    "NumPy": lambda t: torch.from_numpy(np.from_dlpack(t.detach())),
    "to_dlpack": lambda t: torch.from_dlpack(to_dlpack(t)),
    "a capsule": lambda t: torch.from_dlpack(t.detach().__dlpack__()),
    "versioned": lambda t: torch.from_dlpack(torch._C._to_dlpack_versioned(t.detach())),
}


@deed(
    way=GIVEN,
    what=("weight", "state", "gradient"),
    product=True,
    proves=False,
    backward=EITHER,
    forward=LEFT,
)
def give_memory_away(world, way, what):
    """It is kept, shows each update, and what is written there counts."""
    if world.turn:
        world.see_held()
        world.held[-1][1].mul_(0.5)
    world.held.append((what, way(world.tensor(what, 2))))


@deed(BEFORE_STEP, way=GIVEN, setup={"wait_from": 0}, proves=False, backward=EITHER)
def give_gradients_away_and_clip(world, way):
    kept = [way(p.grad) for p in world.params()]
    nn.utils.clip_grad_norm_(world.params(), 0.01)
    world.see("clipped", kept)


@deed(ALONE, way=GIVEN, forward=LEFT, backward=LEFT)
def parameters_that_need_no_gradient(world, way):
    """Their gradients come from elsewhere, as in evolution strategies."""
    params = [nn.Parameter(torch.ones(n, 3), requires_grad=False) for n in (4, 9)]
    optimizer = world.wrap(adamw(params))
    kept = list(map(way, params))
    for i in range(4):
        for p in params:
            p.grad = numbers(i, *p.shape)
        optimizer.step()
        world.see("parameters", kept)
        kept[1].mul_(0.9)
    world.see("state", optimizer.state_dict())


@deed(ALONE, flush=BOOL, forward=lambda kind, flush: EQUAL if flush else DIFFERS)
def keep_a_raw_address(world, flush):
    """It is read once the next update is pending."""
    model, optimizer = world.own()
    world.train()
    world.launch()
    address, size = model[0].weight.data_ptr(), model[0].weight.nbytes
    world.train()
    if flush:
        world.launch()
    world.see("weight", ctypes.string_at(address, size))


@deed(weight=0, what=("weight", "state", "gradient"), fault="copy_on_write", backward=EITHER)
def keep_a_lazy_clone(world, what):
    """Memory that copies on write: an update writes to the optimizer's own."""
    world.see_held()
    world.held.append((what, torch._lazy_clone(world.tensor(what, 2).detach())))


# ---- gradients that are parts of DistributedDataParallel's buckets

BUCKETS = {"models": ["mlp"], "ddp": "views"}
PARTS = {
    "itself": lambda g: g,
    "data": lambda g: g.data,
    "detach": lambda g: g.detach(),
    "flat": lambda g: g.view(-1),
    "storage": lambda g: torch.empty(0).set_(g.untyped_storage()),
}


@deed(setup=BUCKETS, way=PARTS, backward=EITHER, kinds=("AdamW",))
def write_to_a_part_of_a_bucket(world, way):
    way(world.grad()).mul_(0.5)


@deed(
    STEP,
    setup=BUCKETS,
    kinds=("AdamW",),
    way={"alias": lambda g: g.data, "bucket": lambda g: g._base},
    flush=(False, True),
    product=True,
    forward=lambda kind, way, flush: EQUAL if flush else DIFFERS,
    backward=EITHER,
)
def write_to_an_older_alias_of_a_bucket(world, way, flush):
    """The update has read the gradient; a pending one reads what was written."""
    alias = way(world.grad())
    world.step(0)
    if flush:
        world.launch()
    if alias is not None:
        alias.mul_(0.5)


# ---- between a layer's forward pass and its recomputation


def fused(world, optimizer):
    return world.wrap(optimizer)


def unfused(world, optimizer):
    return optfuse.unfuse(optimizer)


def dead(world, optimizer):
    world.optimizers.clear()


COMES_OR_GOES = {"fuse": (None, fused), "unfuse": (fused, unfused), "die": (fused, dead)}


@deed(
    ALONE,
    way=COMES_OR_GOES,
    dims=((3, 4), (2, 3, 4)),
    product=True,
    proves=False,
    backward=EITHER,
)
def stands_behind_a_layer(world, way, dims):
    """A checkpoint gives back by position what its recomputation saves."""
    model = world.build("checkpointed and promised")
    before, between = way
    optimizer = sgd(model.parameters())
    if before and world.fused:
        before(world, optimizer)
    loss = model(numbers(1, *dims)).square().mean()
    if world.fused:
        between(world, optimizer)
    del optimizer
    gc.collect()
    loss.backward()
    world.see("gradients", [p.grad for p in model.parameters()])
