# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of models sharded by FSDP2: scripts for common.same() on every rank."""

import functools
import tempfile

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_models import local, start, train, trained
from ranks import script_of
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import init_device_mesh

SCENARIOS = {}
script = functools.partial(script_of, SCENARIOS, "forward", "backward")


def after(wrap, steps, **options):
    model, optimizer = start(wrap, **options)
    for i in range(steps):
        train(model, optimizer, i)
    return model, optimizer


def training_on(model, optimizer):
    return trained(model, optimizer, lambda m, o, i: train(m, o, 5 + i), 5)


@script()
def state_dict(wrap):
    """Taken, loaded into another optimizer, and trained on."""
    model, optimizer = after(wrap, 5)
    saved = optimizer.state_dict(), model.state_dict()
    yield "state", local(saved[0])
    saved = [{k: v.clone() if hasattr(v, "clone") else v for k, v in d.items()} for d in saved]
    other, resumed = after(wrap, 2)
    other.load_state_dict(saved[1])
    resumed.load_state_dict(saved[0])
    yield from training_on(other, resumed)


@script(full={"full": True}, sharded={"full": False})
def state_dicts_of_distributed_checkpoints(wrap, full):
    """get_optimizer_state_dict() calls step() with lr 0 and no backward where there is no state."""
    options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=full)
    model, optimizer = start(wrap)
    yield "before the first step", local(get_optimizer_state_dict(model, optimizer))
    for i in range(5):
        train(model, optimizer, i)
    states = get_state_dict(model, optimizer, options=options)
    yield "states", local(list(states))
    other, resumed = start(wrap)
    named = dict(zip(("model_state_dict", "optim_state_dict"), states, strict=True))
    set_state_dict(other, resumed, **named, options=options)
    yield from training_on(other, resumed)


@script(same={"fewer": False, "steps": 3}, fewer={"fewer": True, "steps": 0})
def saved_and_loaded(wrap, fewer, steps):
    """By as many processes, or by a half of them, which share it out anew."""
    world = dist.get_world_size()
    half = max(1, world // 2)
    mesh = init_device_mesh("cpu", (world // half, half), mesh_dim_names=("a", "b"))["b"]
    model, optimizer = after(wrap, 5)
    with tempfile.TemporaryDirectory() as folder:
        names = [folder]
        dist.broadcast_object_list(names)
        states = get_state_dict(model, optimizer)
        dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=names[0])
        other, resumed = after(wrap, steps, **({"mesh": mesh} if fewer else {}))
        states = get_state_dict(other, resumed)
        wanted = {"model": states[0], "optimizer": states[1]}
        dcp.load(wanted, checkpoint_id=names[0])
        dist.barrier()
    set_state_dict(
        other, resumed, model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"]
    )
    yield "full", {k: v.full_tensor() for k, v in get_model_state_dict(other).items()}
    yield from training_on(other, resumed)
