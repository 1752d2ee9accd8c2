# SPDX-License-Identifier: BSD-3-Clause
"""Deeds of models and parameters that are distributed, here over one process."""

import threading

import torch
from common import adamw
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import optfuse
from programs.deed import ALONE, EITHER, deed, raises
from programs.models import rows

GROUP = {"setup": {"group": True}}


def train(world, model, optimizer, i=0):
    optimizer.zero_grad()
    model(rows(i)).square().mean().backward()
    optimizer.step()


@deed(ALONE, **GROUP, backward=raises("DistributedDataParallel"), fault="ddp")
def model_that_is_not_known_to_be_parallel(world):
    model, optimizer = world.own()
    train(world, DistributedDataParallel(model), optimizer)
    world.see("weights", world.params())


def doubled(_, bucket):
    """A communication hook."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer().mul_(2))
    return future


def doubled_later(_, bucket):
    """After the end of backward, as where the network is slow."""
    future, buffer = torch.futures.Future(), bucket.buffer()
    threading.Timer(0.1, lambda: future.set_result(buffer.mul_(2))).start()
    return future


def train_with(world, hook, skips=False):
    """skips: the gradients of every other pass are thrown away, and nobody looks at them."""
    model = world.build()
    wrapped = DistributedDataParallel(model)
    optimizer = adamw(model.parameters())
    if world.fused:
        world.wrap(optimizer, ddp=optfuse.DDPModel(wrapped, (None, hook)))
    else:
        wrapped.register_comm_hook(None, hook)
        world.wrap(optimizer)
    for i in range(3):
        if skips:
            wrapped(rows(i)).square().mean().backward()
        train(world, wrapped, optimizer, 10 + i)
    world.see("weights", world.params())


@deed(ALONE, **GROUP, fault=("reduced", "consumed", "discarded", "twice"))
def reduction_that_doubles(world):
    train_with(world, doubled)


@deed(ALONE, **GROUP, backward=EITHER, fault="await")
def reduction_that_is_slow(world):
    train_with(world, doubled_later)


@deed(ALONE, **GROUP, backward=EITHER, fault="reuse")
def reduction_whose_bucket_is_used_again(world):
    train_with(world, doubled_later, skips=True)


class Skips(nn.Module):
    """Its last layer is used in the first iteration only."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.never = nn.Linear(1, 1)  # else DDP warns that all are used at first
        self.uses = 0

    def forward(self, x):
        self.uses += 1
        x = self.first(x).tanh()
        return self.last(x) if self.uses == 1 else x


@deed(ALONE, **GROUP, backward=EITHER, fault="bucket")
def bucket_that_is_written_under_an_update(world):
    model = Skips()
    wrapped = DistributedDataParallel(
        model, find_unused_parameters=True, gradient_as_bucket_view=True
    )
    optimizer = world.wrap(adamw(model.parameters()))
    for i in range(2):
        train(world, wrapped, optimizer, i)
    world.see("weights", list(model.parameters()))


# ---- DTensors


def keep_gradients(world, keep):
    """Hooks keep them, which change between backward() and step()."""
    model, held = fully_shard(nn.Linear(4, 3)), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: held.append(keep(p.grad)))
    optimizer = world.wrap(adamw(model.parameters()))
    model(rows(0)).square().mean().backward()
    for grad in held:
        grad.mul_(-1.0)
    optimizer.step()
    world.see("weights", [p.full_tensor() for p in model.parameters()])


@deed(ALONE, **GROUP, fault=("held", "discarded"))
def dtensor_that_a_hook_keeps(world):
    keep_gradients(world, lambda grad: grad)


@deed(ALONE, **GROUP, fault=("sibling", "discarded"))
def memory_of_a_dtensor_that_a_hook_keeps(world):
    keep_gradients(world, lambda grad: grad._local_tensor.view(-1))


def sharded(world):
    """distribute_tensor() sends a message; gloo's thread has the memory for a while after it, and
    what is not private does not wait."""
    mesh = init_device_mesh("cpu", (1,))
    param = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Shard(0)], run_check=False))
    return param, world.wrap(adamw([param]))


@deed(ALONE, **GROUP, stock=EITHER, backward=EITHER, fault="wrapper_version")
def graph_of_a_dtensor_that_is_kept(world):
    param, optimizer = sharded(world)
    loss = (param * param).to_local().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


@deed(ALONE, **GROUP, fault=("wrapper", "seal"))
def operator_on_a_dtensor(world):
    param, optimizer = sharded(world)
    param.grad = torch.ones_like(param)
    optimizer.step()
    world.see("pending", world.pending(optimizer) if world.mode == "forward" else 1)
    world.see("weight", (param * 1).to_local())


class Buffers:
    """A reduction into memory that is used again and again."""

    def __init__(self):
        self.of = {}

    def allocate(self, size, *, dtype, device):
        return self.of.setdefault(len(self.of), torch.empty(*size, dtype=dtype, device=device))


@deed(ALONE, **GROUP, fault="base")
def buffer_of_a_reduction_that_is_used_again(world):
    model, buffers = fully_shard(nn.Linear(4, 3)), Buffers()
    model.set_custom_reduce_scatter(buffers)
    optimizer = world.wrap(adamw(model.parameters()))
    model(rows(0)).square().mean().backward()
    optimizer.step()
    for buffer in buffers.of.values():
        buffer.fill_(7.0)
    world.see("weights", [p.full_tensor() for p in model.parameters()])
