# SPDX-License-Identifier: BSD-3-Clause
"""Scripts that train with optimizers of torch.distributed that step one inside of them."""

import functools

import torch
import torch.distributed as dist
from common import sgd
from ddp_models import BUCKETS, Net, train
from ranks import LONG, STEPS, script_of
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

SCENARIOS = {}
script = functools.partial(script_of, SCENARIOS, "forward")


def zero_of(wrap, views):
    """A model and what updates it: each rank its own part of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = Net()
    wrapped = DDP(model, **BUCKETS)
    options = {"lr": 1e-2, "weight_decay": 1e-1, "fused": True}
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=views, **options
    )
    wrap(zero.optim)
    return model, wrapped, zero


def consolidated(zero):
    """The state of all ranks, which only one of them gets; here all do."""
    zero.consolidate_state_dict(to=0)
    found = [zero.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    return found[0]


# Views of a bucket are memory that others know: these updates run in step().
@script(prove=False, views={"views": True})
@script(**{"": {"views": False}})
def zero(wrap, views):
    """Half-way everything is built anew from a checkpoint; the learning rate is scheduled
    where users see it, in the outer optimizer."""
    model, wrapped, optimizer = zero_of(wrap, views)
    for part in range(2):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        for i in range(STEPS // 2):
            yield "loss", train(wrapped, optimizer, STEPS * part + i)
            scheduler.step()
        yield "parameters", dict(model.state_dict())
        state = consolidated(optimizer)
        yield "state", state
        if part == 0:
            weights = {name: w.clone() for name, w in model.state_dict().items()}
            model, wrapped, optimizer = zero_of(wrap, views)
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)


@script(**{"": {"fused_before": False}, "fused before": {"fused_before": True}})
def local_sgd(wrap, fused_before):
    """From the 11th step on ranks train apart and average their parameters now and then."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = Net().to(memory_format=torch.contiguous_format)  # as averaging makes it
    wrapped = DDP(model, **BUCKETS)
    alone, _ = dist.new_subgroups(group_size=1)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=10)
    wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    inner = sgd(model.parameters())
    if fused_before:
        wrap(inner)
    averager = PeriodicModelAverager(period=4, warmup_steps=10)
    optimizer = PostLocalSGDOptimizer(inner, averager)
    if not fused_before:
        wrap(optimizer.optim)
    for i in range(LONG):
        yield "loss", train(wrapped, optimizer, i)
    yield "parameters", dict(model.state_dict())
    yield "state", optimizer.state_dict()
