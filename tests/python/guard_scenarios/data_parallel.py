# SPDX-License-Identifier: BSD-3-Clause
"""Guards of training under DistributedDataParallel, here of one process. Models are made in
functions of their own: one that outlives its group ends it under the GIL, for which PyTorch's
own threads may be waiting then."""

import threading

import torch
from common import (
    adamw,
    assert_same,
    batch,
    fuse_with,
    loss_of,
    net,
    one_process,
    train,
    weights,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import optfuse
from guard_scenarios.registry import Pair, guards, must_raise


def refuse_an_unknown_model():
    pair = Pair(mode="backward")
    model = DDP(pair.ours)
    must_raise(lambda: model(batch(0)[0]).sum().backward(), "backward of a DDP model")
    pair.assert_same()  # it was refused before an update


@guards("ddp")
def a_data_parallel_model_is_refused():
    with one_process():
        refuse_an_unknown_model()


def trained_with(hook, iterate, fuse):
    """The weights after three iterations with this communication hook."""
    torch.manual_seed(0)
    model = net()
    wrapped = DDP(model)
    optimizer = adamw(model.parameters())
    fuse(optimizer, wrapped, hook)
    for i in range(3):
        iterate(wrapped, optimizer, i)
    return weights(model)


def compare(hook, iterate, mode, **options):
    """Three iterations with this communication hook, fused in this mode and stock's."""

    def ours(optimizer, wrapped, hook):
        fuse_with(optimizer, mode, ddp=optfuse.DDPModel(wrapped, (None, hook)), **options)

    def stock(_, wrapped, hook):
        wrapped.register_comm_hook(None, hook)

    with one_process():
        trained = [trained_with(hook, iterate, fuse) for fuse in (ours, stock)]
    assert_same("weights", *trained)


def doubled(_, bucket):
    """A communication hook."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer().mul_(2))
    return future


@guards("reduced", "consumed", "discarded", "twice")
def an_update_waits_for_the_reduction_of_its_gradient():
    # Small gradients would wait for each other, and so for the reduction.
    compare(doubled, train, "backward", bucket_bytes=1)


def doubled_later(_, bucket):
    """After the end of backward, as where the network is slow."""
    future, buffer = torch.futures.Future(), bucket.buffer()
    threading.Timer(0.1, lambda: future.set_result(buffer.mul_(2))).start()
    return future


@guards("await")
def an_update_waits_for_the_gradient_that_is_on_its_way():
    compare(doubled_later, train, "forward")


@guards("reuse")
def a_bucket_is_not_used_again_while_it_is_on_its_way():
    """The gradients of every other pass are thrown away, and nobody looks at them."""

    def iterate(wrapped, optimizer, i):
        loss_of(wrapped, i).backward()
        train(wrapped, optimizer, 10 + i)

    compare(doubled_later, iterate, "forward")


class Skips(nn.Module):
    """Its last layer is used in the first iteration only."""

    def __init__(self):
        super().__init__()
        self.layers = net()
        self.last = nn.Linear(3, 3)
        self.never = nn.Linear(1, 1)  # else DDP warns that all are used at first
        self.uses = 0

    def forward(self, x):
        self.uses += 1
        x = self.layers(x)
        return self.last(x) if self.uses == 1 else x


def trained_with_skips(is_fused):
    torch.manual_seed(0)
    model = Skips()
    wrapped = DDP(model, find_unused_parameters=True, gradient_as_bucket_view=True)
    optimizer = adamw(model.parameters())
    if is_fused:
        optfuse.fuse(optimizer, bucket_bytes=1)  # no neighbour's use launches it
    train(wrapped, optimizer, 0)
    if is_fused and optfuse.summary(optimizer).pending == 0:
        raise RuntimeError("no update is pending: the scenario would prove nothing")
    train(wrapped, optimizer, 1)
    return weights(model)


@guards("bucket")
def a_gradient_is_not_overwritten_under_its_update():
    with one_process():
        trained = [trained_with_skips(is_fused) for is_fused in (True, False)]
    assert_same("weights", *trained)
