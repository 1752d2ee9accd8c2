# SPDX-License-Identifier: BSD-3-Clause
"""Deeds under activation checkpointing, which computes blocks once more inside backward. A weight
that such a block reads past autograd may have been updated by then, and stock would still read the
old one."""

import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from programs.deed import ALONE, BOOL, DIFFERS, deed, elsewhere, raises
from programs.models import rows

UPDATED = raises("checkpointing", "already updated it")


def no_grad(head, h):
    with torch.no_grad():
        gate = head(h).sigmoid()
    return h * gate


#: Ways in which a block uses the layer behind it.
READS = {
    "detach": lambda head, h: h + linear(h, head.weight.detach()),
    "data": lambda head, h: h + h @ head.weight.data,
    "norm": lambda head, h: h * head.weight.detach().norm(),
    "no_grad": no_grad,
    "a part": lambda head, h: h * head.weight[0].detach(),
}


def train(world, block, reentrant=False):
    """Three iterations of three layers, of which the block is given the first one's output."""
    first, _, head = world.model().layers
    for i in range(3):

        def loss(i=i):
            h = checkpoint(block, first(rows(i)), use_reentrant=reentrant)
            return head(h.tanh()).square().mean()

        world.train(loss)
    world.look(gradients=False)


@deed(ALONE, read=READS, reentrant=BOOL, product=True, backward=UPDATED)
def block_reads_a_weight(world, read, reentrant):
    model, _ = world.own("layers")
    body, head = model.layers[1:]
    train(world, lambda h: read(head, body(h).tanh()), reentrant)


@deed(ALONE, read=READS)
def block_reads_a_weight_whose_update_waits(world, read):
    """Small ones are made together behind the pass, and the block reads the old weight."""
    world.bucket_bytes = 0
    model, _ = world.own("layers")
    body, head = model.layers[1:]
    train(world, lambda h: read(head, body(h).tanh()))


#: Parts of a layer's state, as a block may read them.
STATE = {
    "momentum": lambda entry: entry["exp_avg"].norm(),
    "step": lambda entry: entry["step"].item(),
    "a raw address": lambda entry: entry["exp_avg_sq"].data_ptr(),
}


@deed(
    ALONE,
    read=STATE,
    reentrant=BOOL,
    product=True,
    backward=raises("the state of ", "already updated it"),
)
def block_reads_state(world, read, reentrant):
    model, optimizer = world.own("layers")
    world.train(lambda: world.loss(0, 0))

    def block(h):
        read(optimizer.state[model.layers[2].weight])
        return model.layers[1](h).tanh()

    train(world, block, reentrant)


@deed(ALONE, reentrant=BOOL)
def block_makes_tensors_like_a_weight(world, reentrant):
    """They have none of its numbers, and a hook runs behind the block."""
    model, _ = world.own("layers")
    body, head = model.layers[1:]

    def block(h):
        h = body(h) + torch.ones_like(head.weight)[0] + head.weight.new_ones(4)
        if h.requires_grad:
            h.register_hook(lambda grad: grad + 0 * head.weight.detach()[0])
        return h.tanh()

    train(world, block, reentrant)


@deed(ALONE, bucket_bytes=(0, 1))
def weight_that_is_given_to_the_block(world, bucket_bytes):
    world.bucket_bytes = bucket_bytes
    model, _ = world.own("layers")
    first, body, head = model.layers

    def loss():
        weight = head.weight.detach()
        h = checkpoint(
            lambda h, w: linear(body(h), w), first(rows(world.i)), weight, use_reentrant=False
        )
        return head(h).square().mean()

    for _ in range(4):
        world.train(loss)
    world.look(gradients=False)


@deed(ALONE)
def block_inside_of_a_block(world):
    """Its weights have their gradients from there."""
    model, _ = world.own("layers")
    first, body, head = model.layers

    def outer(h):
        return checkpoint(lambda h: head(h).tanh(), body(h).tanh(), use_reentrant=False)

    def loss():
        return checkpoint(outer, first(rows(world.i)), use_reentrant=False).square().mean()

    for _ in range(4):
        world.train(loss)
    world.look(gradients=False)


@deed(ALONE, backward=UPDATED)
def passes_over_parts_of_the_parameters(world):
    """The second one computes the block again, whose weights the first one has updated."""
    model, optimizer = world.own("layers")
    first, body, _ = model.layers
    for i in range(3):
        optimizer.zero_grad()
        loss = checkpoint(body, first(rows(i)).tanh(), use_reentrant=False).square().mean()
        loss.backward(inputs=list(body.parameters()), retain_graph=True)
        loss.backward(inputs=list(first.parameters()))
        optimizer.step()
    world.look(gradients=False)


@deed(ALONE, backward=DIFFERS)
def hook_that_reads_a_weight(world):
    """The layer behind it has its gradients by then."""
    model, _ = world.own("layers")
    first, _, head = model.layers

    def loss():
        h = first(rows(world.i))
        h.register_hook(lambda _: world.see("weight", head.weight))
        return head(h.tanh()).square().mean()

    world.train(loss)


@deed(ALONE, backward=DIFFERS)
def thread_of_a_block_that_reads_a_weight(world):
    """It is not known to be of the block."""
    model, _ = world.own("layers")
    body, head = model.layers[1:]

    def block(h):
        elsewhere(world.see, "weight", head.weight)
        return body(h).tanh()

    train(world, block)
