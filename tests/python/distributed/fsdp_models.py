# SPDX-License-Identifier: BSD-3-Clause
"""Models sharded by FSDP2 (fully_shard): to train, and to look at."""

import copy
import io

import torch
import torch.distributed as dist
from common import adamw
from ranks import STEPS
from scripts import told
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def local(value):
    """The same with plain tensors: of a DTensor its layout, and what this rank has of it."""
    if isinstance(value, DTensor):
        return [str(value.placements), tuple(value.shape), value.to_local()]
    if isinstance(value, dict):
        return {key: local(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [local(item) for item in value]
    return value


def everything(model, optimizer):
    yield "parameters", local(dict(model.state_dict()))
    yield "optimizer state", local(optimizer.state_dict())


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """width: 7 gives shards of unequal sizes, and the head empty ones on some ranks."""

    def __init__(self, width=7, blocks=3, outputs=1):
        super().__init__()
        self.first = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, outputs)

    def forward(self, x, skip=()):
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            if i not in skip:
                x = block(x)
        return self.head(x)


def shard(model, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def loss_of(model, i, **options):
    """The loss of a batch of this rank's own."""
    generator = torch.Generator().manual_seed(1000 * i + dist.get_rank())
    x = torch.randn(6, 5, generator=generator)
    y = torch.randn(6, 1, generator=generator)
    return nn.functional.mse_loss(model(x, **options).float(), y)


def train(model, optimizer, i, set_to_none=True, **options):
    optimizer.zero_grad(set_to_none)
    loss = loss_of(model, i, **options)
    loss.backward()
    optimizer.step()
    return loss


def start(wrap, model=None, make=adamw, **options):
    """A model that is sharded with these options, and its optimizer."""
    model = shard(model or Net(), **options)
    return model, wrap(make(model.parameters()))


def trained(model, optimizer, iteration, steps=STEPS):
    """iteration: returns a loss, or yields what is to be compared."""
    for i in range(steps):
        yield from told("iteration", iteration(model, optimizer, i))
    yield from everything(model, optimizer)


def training(model, optimizer):
    return trained(model, optimizer, train)


def looks_between_steps(model, optimizer, gradients):
    """Each way to see a sharded parameter or its state: names, and functions that look."""
    parameters = list(model.parameters())
    return [
        ("values", lambda: [p.full_tensor() for p in parameters]),
        ("locals", lambda: [p.to_local() for p in parameters]),
        ("raw", lambda: [p._local_tensor for p in parameters]),
        ("an operator", lambda: local([p + 1 for p in parameters])),
        ("state", lambda: local([optimizer.state[p] for p in parameters])),
        (
            "state by operators",
            lambda: [optimizer.state[p]["exp_avg"].full_tensor() for p in parameters],
        ),
        ("norm", lambda: sum(p.norm().full_tensor() for p in parameters)),
        ("data", lambda: [p.data.to_local() for p in parameters]),
        ("detached", lambda: [p.detach().full_tensor() for p in parameters]),
        ("copied", lambda: [copy.deepcopy(p.detach()).to_local() for p in parameters]),
        ("listed", lambda: local(torch._foreach_mul([p.detach() for p in parameters], 2.0))),
        ("gradients", lambda: local([p.grad for p in parameters] if gradients else [])),
        ("raw gradients", lambda: [p.grad._local_tensor for p in parameters] if gradients else []),
        ("raw state", lambda: [optimizer.state[p]["exp_avg_sq"]._local_tensor for p in parameters]),
        ("bytes", lambda: [bytes_of(p) for p in parameters]),
    ]


def looking(wrap, model, optimizer, train, shown=None):
    """Trains and looks in each of these ways, twice. shown: holds the parameters that are looked
    at."""
    gradients = wrap.way == "forward"
    for i in range(2 * 15):
        train(i)
        name, look = looks_between_steps(shown or model, optimizer, gradients)[i % 15]
        wrap.pending()
        yield name, look()
    yield from everything(model, optimizer)


def bytes_of(param):
    """As a checkpoint has it."""
    file = io.BytesIO()
    torch.save(param._local_tensor.detach(), file)
    return file.getvalue()
