# SPDX-License-Identifier: BSD-3-Clause
"""Training with Forward(ddp=model), over a network that is slower than backward()."""

import time
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist
from common import adamw, everything
from ddp_scripts import SMALL, Net, train
from ranks import STEPS
from scripts import trained
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

import optfuse

DELAY = 0.004  # seconds that a message takes beyond gloo
SLOW = {
    "copies": {"broadcast_buffers": False, "bucket_cap_mb": SMALL},
    "views": {"broadcast_buffers": False, "bucket_cap_mb": SMALL, "gradient_as_bucket_view": True},
}
SLOW["static"] = {**SLOW["copies"], "static_graph": True}
SLOW = {name: {"options": options} for name, options in SLOW.items()}


class Network:
    """Messages take DELAY one after the other, in a communication hook."""

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


def slow(wrap, model, make=adamw, delay=DELAY, **options):
    """DDP, its optimizer and the network between the processes."""
    wrapped = DDP(model, **options)
    network = Network(delay)
    return wrapped, later(wrap, wrapped, make(model.parameters()), (network, over)), network


def later(wrap, wrapped, optimizer, hook=None):
    """Fused, or stock's with the same communication hook."""
    if wrap.fused:
        known = wrapped._comm_hooks  # by another optimizer of this model
        return wrap(optimizer, ddp=optfuse.DDPModel(wrapped, None if known else hook))
    if hook and not wrapped._comm_hooks:
        wrapped.register_comm_hook(*hook)
    return optimizer


def training(wrapped, optimizer, network=None, wrap=None):
    for i in range(STEPS):
        loss = train(wrapped, optimizer, i)
        if network and wrap.fused and i > 2:
            assert network.is_busy(), "step() has waited: the test would prove nothing"
        yield "loss", loss
    yield from everything(wrapped.module, optimizer)


def awaited(iteration=train, steps=STEPS, make=adamw, options=SLOW["copies"]["options"]):
    """A script whose iterations are given DDP and its optimizer over a slow network."""

    def start(wrap):
        wrapped, optimizer, network = slow(wrap, Net(), make, **options)
        wrapped.network = network if wrap.fused else None
        return wrapped, optimizer

    return trained(start=start, iteration=iteration, steps=steps)


def assert_busy(wrapped, i):
    if wrapped.network and i > 2:
        assert wrapped.network.is_busy(), "it has waited: the test would prove nothing"
