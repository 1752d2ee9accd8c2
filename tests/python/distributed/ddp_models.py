# SPDX-License-Identifier: BSD-3-Clause
"""Models under DistributedDataParallel: to train, over a slow network, too."""

import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from common import adamw, everything
from ranks import STEPS
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

import optfuse

SMALL = 0.0002  # MiB a bucket: several buckets for a model of some hundred parameters
BUCKETS = {"bucket_cap_mb": SMALL}
VIEWS = {
    "copies": {"options": BUCKETS},
    "views": {"options": {**BUCKETS, "gradient_as_bucket_view": True}},
}
DELAY = 0.004  # seconds that a message takes beyond gloo
SLOW = {
    name: {"options": {**case["options"], "broadcast_buffers": False}, "delay": DELAY}
    for name, case in {**VIEWS, "static": {"options": {**BUCKETS, "static_graph": True}}}.items()
}


class Net(nn.Module):
    """Weights in several layouts and dtypes of buckets, and buffers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.hidden = nn.Linear(4 * 9, 16)
        self.spare = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x, spare=True):
        x = torch.tanh(self.norm(self.conv(x)))
        x = torch.tanh(self.hidden(x.flatten(1)))
        if spare:
            x = torch.tanh(self.spare(x))
        return self.head(x)


class Network:
    """Messages take `delay` one after the other, in a communication hook."""

    def __init__(self, delay=DELAY):
        self.delay = delay
        self.last = None  # the future of the last message
        self.wire = ThreadPoolExecutor(1)

    def carry(self, work, buffer, arrived):
        try:
            work.wait()
        except Exception as error:
            arrived.set_exception(error)
            return
        time.sleep(self.delay)
        arrived.set_result(buffer)

    def mean(self, buffer):
        buffer.mul_(1.0 / dist.get_world_size())
        self.last = Future()
        work = dist.all_reduce(buffer, async_op=True)
        self.wire.submit(self.carry, work, buffer, self.last)
        return self.last

    def is_busy(self):
        return not self.last.done()


def over(network, bucket):
    return network.mean(bucket.buffer())


def fused(wrap, wrapped, optimizer, hook=None, **options):
    """The optimizer, fused the way of this run (ranks.script_of()): "awaited" is forward mode that
    knows DDP. hook: DDP's communication hook, which fuse() is given or DDP itself."""
    known = wrapped._comm_hooks  # by another optimizer of this model
    if wrap.fused and wrap.way != "forward":
        ddp = optfuse.DDPModel(wrapped, None if known else hook)
        return wrap(optimizer, ddp=ddp, **options)
    if hook and not known:
        wrapped.register_comm_hook(*hook)
    return wrap(optimizer, **options)


def start(wrap, model=None, make=adamw, options=BUCKETS, hook=None, delay=0.0):
    """DDP of the model, and its optimizer. delay: of a slow network between the processes."""
    wrapped = DDP(model or Net(), **options)
    network = Network(delay) if delay else None
    optimizer = make(wrapped.parameters())
    optimizer = fused(wrap, wrapped, optimizer, (network, over) if network else hook)
    wrapped.network = network if wrap.fused and wrap.way == "awaited" else None
    return wrapped, optimizer


def assert_busy(wrapped, i):
    if wrapped.network and i > 2:
        assert wrapped.network.is_busy(), "it has waited: the test would prove nothing"


def loss_of(model, i, **options):
    """The loss of a batch of this rank's own."""
    generator = torch.Generator().manual_seed(1000 * i + dist.get_rank())
    x = torch.randn(5, 2, 3, 3, generator=generator)
    y = torch.randn(5, 3, generator=generator)
    return nn.functional.mse_loss(model(x, **options), y)


def train(model, optimizer, i, **options):
    optimizer.zero_grad()
    loss = loss_of(model, i, **options)
    loss.backward()
    optimizer.step()
    return loss


def training(wrapped, optimizer, steps=STEPS):
    for i in range(steps):
        yield "loss", train(wrapped, optimizer, i)
    yield from everything(wrapped.module, optimizer)
