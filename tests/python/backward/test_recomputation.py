# SPDX-License-Identifier: BSD-3-Clause
"""Activation checkpointing computes blocks once more inside backward. A weight that such a block
reads past autograd may have been updated by then, and stock would still read the old one."""

import threading

import pytest
import torch
from common import adamw, batch, refused, sgd
from programs.deeds.recomputing import READS
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import optfuse


class Model(nn.Module):
    def __init__(self, read, reentrant):
        super().__init__()
        self.first, self.body, self.head = (nn.Linear(6, 6) for _ in range(3))
        self.read, self.reentrant = READS[read], reentrant

    def block(self, h):
        return self.read(self.head, self.body(h).tanh())

    def forward(self, x):
        h = checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)
        return self.head(h.tanh())


def loss_of(model, i):
    return model(batch(i)[0]).square().mean()


@pytest.mark.parametrize("read", ("sum", "to_local"))
def test_a_dtensor_that_is_updated_already_is_refused(read, gloo):
    """Its operators look at no mark of the local tensor."""

    mesh = init_device_mesh("cpu", (1,))

    def whole(tensor):
        return distribute_tensor(tensor.detach(), mesh, [Replicate()])

    first, body, head = (nn.Parameter(whole(torch.eye(6))) for _ in range(3))
    optimizer = optfuse.fuse(adamw([first, body, head]), mode="backward", bucket_bytes=1)

    def block(h):
        with torch.no_grad():
            getattr(head, read)()
        return linear(h, body).tanh()

    h = checkpoint(block, linear(whole(batch(0)[0]), first), use_reentrant=False)
    refused(linear(h, head).square().mean().backward, "checkpointing", "already updated it")
    assert optfuse.summary(optimizer).created > 0


def test_the_error_names_the_parameter():
    model = Model("detach", False)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optfuse.fuse(optimizer, "backward", bucket_bytes=1)
    refused(loss_of(model, 0).backward, "parameter 'head.weight' of shape (6, 6)", "aten::detach")


def test_after_the_error_weights_can_be_used():
    """No mark is left on them."""
    model = Model("detach", False)
    optimizer = optfuse.fuse(adamw(model.parameters()), mode="backward", bucket_bytes=1)
    refused(loss_of(model, 0).backward)
    assert optfuse.summary(optimizer).created > 0
    with torch.no_grad():
        assert model(batch(0)[0]).isfinite().all()
        checkpoint(model.block, batch(0)[0], use_reentrant=False)


def test_blocks_computed_again_in_two_threads_at_once():
    """Each is refused what it reads, whether another one has begun before or ends in between."""
    body, head = nn.Linear(6, 6), nn.Linear(6, 6)
    optimizer = optfuse.fuse(sgd(head.parameters()), mode="backward", bucket_bytes=1)
    head(batch(3)[0]).square().sum().backward()
    optimizer.step()  # a thread that steps takes marks off where it finds nothing pending
    optimizer.zero_grad()
    inside, go_on = threading.Event(), threading.Event()
    twice = [0, 0]

    def waits(h):
        twice[0] += 1
        if twice[0] == 2:
            inside.set()
            assert go_on.wait(300)
        return h + linear(body(h), head.weight.detach())

    def reads(h):
        return h + linear(body(h), head.weight.detach())

    def again(loss):
        refused(loss.backward, "already updated it")
        twice[1] += 1

    x = [batch(i)[0].requires_grad_() for i in range(2)]
    losses = [
        checkpoint(block, one, use_reentrant=False).square().sum()
        for block, one in zip((waits, reads), x, strict=True)
    ]
    head(batch(2)[0]).square().sum().backward()
    other = threading.Thread(target=again, args=losses[:1])
    other.start()
    assert inside.wait(300)
    again(losses[1])
    head.weight.detach()  # by a thread that computes nothing again
    go_on.set()
    other.join()
    assert twice[1] == 2


def test_a_block_that_is_not_begun_leaves_nothing():
    model = Model("detach", False)
    optimizer = optfuse.fuse(adamw(model.parameters()), mode="backward", bucket_bytes=1)
    loss = loss_of(model, 0)
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"),
        pytest.raises(RuntimeError, match="no hooks here"),
    ):
        loss.backward()
    with torch.no_grad():
        assert model(batch(0)[0]).isfinite().all()
    assert optfuse.summary(optimizer).created > 0
