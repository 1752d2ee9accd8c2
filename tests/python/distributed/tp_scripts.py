# SPDX-License-Identifier: BSD-3-Clause
"""Scripts that train models under tensor parallelism: parameters are DTensors, some of them
sharded and some replicated, and no FSDP2 is there."""

import functools

import torch
import torch.distributed as dist
from common import adamw, refused
from fsdp_models import Net, looking, trained
from ranks import scenario_of, script_of
from style_classes import AdaBelief
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import optfuse

SCENARIOS = {}
scenario = functools.partial(scenario_of, SCENARIOS)
script = functools.partial(script_of, SCENARIOS)
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def parallel(mesh, width=12):
    """Sharded by columns and rows, the rest of it replicated."""
    model = Net(width)
    for block in model.blocks:
        parallelize_module(block, mesh, PLAN)
        distribute_module(block.norm, mesh, input_fn=to_replicated, output_fn=to_local)
    return model


def to_replicated(_, inputs, mesh):
    return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)


def to_local(_, output, mesh):
    return output.to_local()


def loss_of(model, i):
    """The loss of a batch that is the same on all ranks."""
    generator = torch.Generator().manual_seed(1000 * i)
    x = torch.randn(6, 5, generator=generator)
    y = torch.randn(6, 1, generator=generator)
    return nn.functional.mse_loss(model(x), y)


def train(model, optimizer, i):
    optimizer.zero_grad()
    loss = loss_of(model, i)
    loss.backward()
    optimizer.step()
    return loss


def groups_of(model):
    """PyTorch's fused implementation takes DTensors or plain tensors, not both in a group."""
    parameters = list(model.parameters())
    plain = [p for p in parameters if not isinstance(p, DTensor)]
    return [{"params": [p for p in parameters if isinstance(p, DTensor)]}, {"params": plain}]


def mesh_of_all():
    return init_device_mesh("cpu", (dist.get_world_size(),))


@script("forward", "backward")
@script("forward", "backward", prove=False, recorded={"make": AdaBelief})
def plan(wrap, make=adamw):
    """Sharded, replicated and plain parameters."""
    model = parallel(mesh_of_all())
    kinds = {p.placements[0] for p in model.parameters() if isinstance(p, DTensor)}
    assert kinds == {Shard(0), Shard(1), Replicate()}, kinds
    return trained(model, wrap(make(groups_of(model))), train)


@script("forward")
def looked_at_between_steps(wrap):
    model = parallel(mesh_of_all())
    optimizer = wrap(adamw(groups_of(model)[0]["params"]))
    shown = nn.ModuleList(block.up for block in model.blocks)
    return looking(wrap, model, optimizer, functools.partial(train, model, optimizer), shown)


@script("forward", torch={"ours": False}, ours={"ours": True})
def clipped(wrap, ours):
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        clip = optfuse.clip_grad_norm_ if wrap.fused and ours else nn.utils.clip_grad_norm_
        norm = clip(params, 0.1)
        assert isinstance(norm, DTensor)
        yield "norm", [norm.full_tensor(), str(norm.placements)]
        optimizer.step()

    model = parallel(mesh_of_all())
    params = groups_of(model)[0]["params"]
    return trained(model, wrap(adamw(params)), iteration)


@script("forward", "backward")
def with_fsdp(wrap):
    """Sharded by both, over a mesh of two dimensions."""
    world = dist.get_world_size()
    shape = (2, world // 2) if world % 2 == 0 else (world, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("fsdp", "tp"))
    model = Net(12)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], PLAN)
        fully_shard(block, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])
    params = list(model.parameters())
    groups = [{"params": [p for p in params if p.device_mesh.ndim == n]} for n in (1, 2)]
    return trained(model, wrap(adamw(groups)), train)


def weight(placement=None):
    mesh = mesh_of_all()
    return nn.Parameter(
        distribute_tensor(torch.arange(24.0).view(6, 4), mesh, [placement or Shard(0)])
    )


@scenario("forward")
def gradients_of_another_layout_are_refused(mode):
    for param, layout in (
        (weight(), [Partial()]),
        (weight(), [Replicate()]),
        (weight(Replicate()), [Partial()]),
    ):
        optimizer = optfuse.fuse(adamw([param]), mode=mode)
        before = param.full_tensor().clone()
        whole = torch.ones(6, 4)
        param.grad = DTensor.from_local(whole, param.device_mesh, layout, run_check=False)
        refused(optimizer.step, "the gradient of parameter 0", "placements", way_out="redistribute")
        assert param.full_tensor().equal(before) and not optimizer.state
        assert param._local_tensor.grad is None
        optimizer.zero_grad()
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert not param.full_tensor().equal(before)


@scenario("forward")
def state_of_another_layout_is_refused(mode):
    param = weight()
    optimizer = optfuse.fuse(adamw([param]), mode=mode)
    param.grad = torch.ones_like(param)
    optimizer.step()
    before = param.full_tensor().clone()
    for other in (torch.zeros(6, 4), torch.zeros_like(weight(Replicate()))):
        optimizer.state[param]["exp_avg"] = other
        refused(optimizer.step, "the optimizer state of parameter 0", way_out="redistribute")
        assert param.full_tensor().equal(before)


@scenario("forward")
def partial_parameters_are_refused(mode):
    param = DTensor.from_local(torch.ones(3), mesh_of_all(), [Partial()], run_check=False)
    optimizer = adamw([nn.Parameter(param)])
    refused(lambda: optfuse.fuse(optimizer, mode=mode), "placement Partial", way_out="Redistribute")
    assert type(optimizer) is torch.optim.AdamW
