# SPDX-License-Identifier: BSD-3-Clause
"""Scenarios of reorder() under DistributedDataParallel: every rank calls these functions."""

import functools
from unittest import mock

import torch
import torch.distributed as dist
from common import adamw, same
from ddp_models import BUCKETS, Net, fused, training
from ranks import STEPS, scenario_of, script_of
from reorder_scripts import mlp, order_of_backward, x_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import optfuse
from optfuse_layers import communication
from optfuse_layers.reorder import auto_schedule

SCENARIOS = {}
scenario = functools.partial(scenario_of, SCENARIOS, "forward")
script = functools.partial(script_of, SCENARIOS)
LAST, FIRST = {"schedule": "last"}, {"schedule": "reverse_first", "k": 2}
CHOICES = {
    "last": {"choice": LAST},
    "reverse_first": {"choice": FIRST},
    "budget": {"choice": {"schedule": "budget", "memory": 1 << 10}},
    "views": {"choice": FIRST, "gradient_as_bucket_view": True},
}


@script("forward", "backward", **CHOICES)
@script("forward", **{"unused parameters": {"choice": LAST, "find_unused_parameters": True}})
def trained(wrap, choice, **options):
    wrapped = DDP(Net(), **BUCKETS, **options)
    if wrap.fused:
        optfuse.reorder(wrapped, **choice)
    yield from training(wrapped, fused(wrap, wrapped, adamw(wrapped.parameters())))


class Wide(nn.Module):
    """The first layer has the largest message, those behind it the most to compute."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1024, 256)
        self.rest = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x):
        return self.rest(self.first(x).view(-1, 1, 64).expand(-1, 256, 64))


def only_the_first_finds_an_order():
    """Replaces the simulation, whatever else the machine does."""
    k = 3 if dist.get_rank() == 0 else 0
    times = auto_schedule.Times(k=k, iteration=1.0, compute=0.8, exposed=0.2, stock=1.2)
    return mock.patch.object(auto_schedule, "best_k", lambda *_: times)


def watching(sent):
    """A communication hook that notes the parameters in the order of their messages."""

    def hook(group, bucket):
        sent.extend(map(id, bucket.parameters()))
        return allreduce_hook(group, bucket)

    return hook


@scenario()
def auto_orders_the_only_buckets_by_the_k_of_the_first_rank(mode):
    """The first forward pass decides, so that the buckets of the second iteration on, of which
    DistributedDataParallel makes no others, have the order that "auto" has chosen."""
    world, rank, found = dist.get_world_size(), dist.get_rank(), []

    def script(wrap):
        wrapped, sent = DDP(Wide(), **BUCKETS), []
        wrapped.register_comm_hook(None, watching(sent))
        if wrap.fused:
            found.append(optfuse.reorder(wrapped, "auto", network=(1e-4, 1e-8)))
        optimizer = wrap(adamw(wrapped.parameters()))
        for i in range(STEPS):
            optimizer.zero_grad()
            sent.clear()
            loss = wrapped(x_of(world * i + rank, 8, 1024)).square().mean()
            loss.backward()
            assert not wrap.fused or found[0].plan.choice["k"] == 3
            optimizer.step()
            yield "loss", loss
        first, second = wrapped.module.first.weight, wrapped.module.rest[0].weight
        assert (sent.index(id(first)) < sent.index(id(second))) == wrap.fused
        if wrap.fused:
            found[0].kept = wrapped

    with only_the_first_finds_an_order():
        same(script, mode)
    (reordering,) = found
    choice, chosen = reordering.plan.choice, [None] * world
    dist.all_gather_object(chosen, choice)
    assert all(c == chosen[0] for c in chosen), f"{chosen}"
    assert choice["schedule"] == "reverse_first" and reordering.times.exposed >= 0.0
    assert choice["k"] == reordering.times.k == 3, f"{choice}, {reordering.times}"
    order = order_of_backward(reordering.kept.module, x_of(0, 8, 1024))
    held = order[-3:]
    assert held[0] == "dW of module.first", f"{order}"
    assert all(task.startswith("dW of") for task in held), f"{order}"


@script("forward")
def messages_are_measured(wrap):
    wrapped = DDP(mlp(), **BUCKETS)
    reordering = optfuse.reorder(wrapped, "auto") if wrap.fused else None
    optimizer = wrap(torch.optim.SGD(wrapped.parameters(), lr=0.1, fused=True))
    for i in range(8):
        optimizer.zero_grad()
        wrapped(x_of(i)).square().mean().backward()
        optimizer.step()
    assert not reordering or reordering.times and reordering.times.iteration > 0
    yield "weights", dict(wrapped.module.state_dict())


@scenario()
def what_the_first_rank_decides_holds_for_all(mode):
    """Also of a group in which its number is another one, and if plans have different lengths."""
    world, rank = dist.get_world_size(), dist.get_rank()
    alone = dist.new_group([world - 1])
    plan = {"order": list(range(3 + rank)), "seconds": 0.1 + rank}
    device = torch.device("cpu")
    agreed = communication.agreed(plan, dist.group.WORLD, device)
    assert agreed == {"order": [0, 1, 2], "seconds": 0.1}
    if rank == world - 1:
        assert communication.agreed(plan, alone, device) == plan
    assert communication.agreed(plan, None, device) is plan


@scenario()
def a_measured_link_has_times_that_are_possible(mode):
    for seconds in communication.measured(dist.group.WORLD, torch.device("cpu")):
        assert 0.0 <= seconds < 0.1, f"{seconds} s"
