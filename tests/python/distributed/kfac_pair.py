# SPDX-License-Identifier: BSD-3-Clause
"""A model with optfuse.kfac() under DistributedDataParallel, beside its copy with the reference.

Each rank trains on its own batches; beside that it trains the copy on all of them. Float64:
factors and parameters are the reference's within 1e-9, and all ranks have the same bits."""

import copy
import functools

import torch
import torch.distributed as dist
from common import Fused, Stock, differing
from ddp_models import SMALL
from kfac_cases import Ours, Second, assert_close, rows, sgd
from ranks import STEPS
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODES = ("stock", "forward")
FUSIONS = ("each", "all", "threshold", "paper", "planned")
LAYERS = ("conv", "hidden", "twin.0", "twin.1", "head")


class Net(nn.Module):
    """No layer normalizes over a batch. The twins have factors of the same shapes, so that one
    could be taken for the other."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.hidden = nn.Linear(4 * 9, 8)
        self.twin = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 3, bias=False)

    def forward(self, x, order=(0, 1), uses=1, halves=False, head=True):
        y = torch.relu_(self.conv(x))
        y = torch.tanh(self.hidden(y.flatten(1)))
        found = {}
        for i in order:
            twin = self.twin[i]
            z = torch.cat([twin(part) for part in y.chunk(2)]) if halves else twin(y)
            for _ in range(uses - 1):
                z = twin(torch.tanh(z))
            found[i] = torch.tanh(z) * (1 + i)
        y = found[0] + found[1]
        return self.head(y) if head else y


def share_of(i, rank, n=6):
    """A rank's i-th batch."""
    return rows(100 * i + rank, n, 2, 3, 3)


def loss_of(model, x, **how):
    y = model(x, **how)
    return (y.sin() * (1 + y)).square().mean()


class Pair:
    """The model under DistributedDataParallel with ours, and its copy with the reference."""

    def __init__(self, mode, make=sgd, ddp=None, build=Net, **options):
        torch.manual_seed(0)
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.alone = build().double()
        self.model = DDP(copy.deepcopy(self.alone), bucket_cap_mb=SMALL, **(ddp or {}))
        self.wrap = Fused("forward") if mode == "forward" else Stock()
        self.optimizer = self.wrap(make(self.model.module.parameters()))
        self.ours = Ours(self.model, self.optimizer, **options)
        here = ("process_group", "fusion", "placement", "rows", "network")
        options = {name: value for name, value in options.items() if name not in here}
        self.other = make(self.alone.parameters())
        self.reference = Second(self.alone, self.other, **options)

    def zero_grad(self):
        self.optimizer.zero_grad()
        self.other.zero_grad()

    def ours_alone(self, x, weight=1.0, **how):
        """A pass of the model, over a batch of this rank's."""
        (loss_of(self.model, x, **how) * weight).backward()

    def all_alone(self, i, n=6, weight=1.0, how=lambda rank: {}):
        """The same by the copy, over the i-th batches of all ranks."""
        for rank in range(self.world):
            loss = loss_of(self.alone, share_of(i, rank, n), **how(rank))
            (loss * (weight / self.world)).backward()

    def step(self, i, n=6, how=lambda rank: {}):
        """One iteration. how(rank): what that rank's forward pass is given."""
        self.zero_grad()
        self.ours_alone(share_of(i, self.rank, n), **how(self.rank))
        self.ours.step()
        self.all_alone(i, n, how=how)
        self.reference.step()

    def run(self, first=0, how=lambda i, rank: {}, layers=LAYERS):
        """Steps from the first on, after which both are the same."""
        for i in range(first, STEPS):
            self.step(i, how=functools.partial(how, i))
        self.check(layers)

    def check(self, layers=LAYERS):
        model = self.model.module
        for name in layers:
            assert_close(name, self.ours.factors(name), self.reference.factors(name))
        assert_close(
            "parameters", dict(model.named_parameters()), dict(self.alone.named_parameters())
        )
        factors = {name: self.ours.factors(name) for name in layers}
        same_on_all_ranks({"parameters": list(model.parameters()), "factors": factors})
        if self.wrap.fused:
            self.wrap.prove()


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        yield value.detach().clone()
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(item)


def same_on_all_ranks(value):
    for i, mine in enumerate(tensors_of(value)):
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(found, mine.contiguous())
        for rank, other in enumerate(found):
            assert not differing(other, found[0]).any(), f"tensor {i}: rank {rank} differs from 0"
