# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of models sharded by FSDP2: scripts for common.same() on every rank."""

import functools
import shutil
import tempfile

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import adamw, same
from fsdp_models import Net, everything, local, shard, train
from ranks import scenario_of
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import init_device_mesh

SCENARIOS = {}
scenario = functools.partial(scenario_of, SCENARIOS)


def shared_folder():
    """One for all ranks."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    return names[0]


def remove(folder):
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def trained(wrap, steps=5, **options):
    model = shard(Net(), **options)
    optimizer = wrap(adamw(model.parameters()))
    for i in range(steps):
        train(model, optimizer, i)
    return model, optimizer


@scenario("forward", "backward")
def state_dict(mode):
    """Taken, loaded into another optimizer, and trained on."""

    def script(wrap):
        model, optimizer = trained(wrap)
        saved = optimizer.state_dict(), model.state_dict()
        yield "state", local(saved[0])
        saved = [{k: v.clone() if hasattr(v, "clone") else v for k, v in d.items()} for d in saved]
        other, resumed = trained(wrap, steps=2)
        other.load_state_dict(saved[1])
        resumed.load_state_dict(saved[0])
        for i in range(5, 10):
            train(other, resumed, i)
        yield from everything(other, resumed)

    same(script, mode)


@scenario("forward", "backward", full={"full": True}, sharded={"full": False})
def state_dicts_of_distributed_checkpoints(mode, full):
    """get_optimizer_state_dict() calls step() with lr 0 and no backward where there is no state."""

    def script(wrap):
        options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=full)
        model, optimizer = trained(wrap, steps=0)
        yield "before the first step", local(get_optimizer_state_dict(model, optimizer))
        for i in range(5):
            train(model, optimizer, i)
        states = get_state_dict(model, optimizer, options=options)
        yield "states", local(list(states))
        other, resumed = trained(wrap, steps=0)
        set_state_dict(
            other,
            resumed,
            model_state_dict=states[0],
            optim_state_dict=states[1],
            options=options,
        )
        for i in range(5, 10):
            train(other, resumed, i)
        yield from everything(other, resumed)

    same(script, mode)


@scenario("forward", "backward")
def saved_and_loaded_on_the_same_processes(mode):
    folder = shared_folder()

    def script(wrap):
        model, optimizer = trained(wrap)
        name = f"{folder}/{wrap.fused}"
        states = get_state_dict(model, optimizer)
        dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=name)
        other, resumed = trained(wrap, steps=3)
        states = get_state_dict(other, resumed)
        wanted = {"model": states[0], "optimizer": states[1]}
        dcp.load(wanted, checkpoint_id=name)
        set_optimizer_state_dict(other, resumed, wanted["optimizer"])
        other.load_state_dict(wanted["model"])
        for i in range(5, 10):
            train(other, resumed, i)
        yield from everything(other, resumed)

    same(script, mode)
    remove(folder)


@scenario("forward", "backward")
def loaded_on_fewer_processes(mode):
    """Saved by all, and loaded by a half of them, which share it out anew."""
    folder = shared_folder()
    fewer = max(1, dist.get_world_size() // 2)

    def script(wrap):
        model, optimizer = trained(wrap)
        name = f"{folder}/{wrap.fused}"
        states = get_state_dict(model, optimizer)
        dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=name)
        mesh = init_device_mesh(
            "cpu", (dist.get_world_size() // fewer, fewer), mesh_dim_names=("a", "b")
        )["b"]
        other, resumed = trained(wrap, steps=0, mesh=mesh)
        states = get_state_dict(other, resumed)
        wanted = {"model": states[0], "optimizer": states[1]}
        dcp.load(wanted, checkpoint_id=name)
        set_state_dict(
            other,
            resumed,
            model_state_dict=wanted["model"],
            optim_state_dict=wanted["optimizer"],
        )
        yield "full", {k: v.full_tensor() for k, v in get_model_state_dict(other).items()}
        for i in range(5, 10):
            train(other, resumed, i)
        yield from everything(other, resumed)

    same(script, mode)
    remove(folder)
