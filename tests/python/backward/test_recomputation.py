# SPDX-License-Identifier: BSD-3-Clause
"""Activation checkpointing computes blocks once more inside backward. A weight that such a block
reads past autograd may have been updated by then, and stock would still read the old one."""

import threading

import pytest
import torch
from common import adamw, batch, everything, refused, same, sgd
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import optfuse

reentrant_or_not = pytest.mark.parametrize("reentrant", (False, True))


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


def script_of(read, reentrant):
    def script(wrap):
        model = Model(read, reentrant)
        optimizer = wrap(adamw(model.parameters()))
        for i in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, i)
            loss.backward()
            optimizer.step()
            yield "loss", loss
            del loss
        yield from everything(model, optimizer)

    return script


@reentrant_or_not
@pytest.mark.parametrize("read", READS)
def test_a_weight_that_is_updated_already_is_refused(read, reentrant):
    model = Model(read, reentrant)
    optimizer = optfuse.fuse(adamw(model.parameters()), mode="backward", bucket_bytes=1)
    refused(loss_of(model, 0).backward, "checkpointing", "already updated it")
    assert optfuse.summary(optimizer).created > 0
    same(script_of(read, reentrant), "forward")


#: Parts of a layer's state, as a block may read them.
STATE = {
    "momentum": lambda entry: entry["exp_avg"].norm(),
    "step": lambda entry: entry["step"].item(),
    "a raw address": lambda entry: entry["exp_avg_sq"].data_ptr(),
}


@reentrant_or_not
@pytest.mark.parametrize("read", STATE)
def test_state_that_is_written_already_is_refused(read, reentrant):
    model = Model("norm", reentrant)

    def block(h):
        STATE[read](optimizer.state[model.head.weight])
        return model.body(h).tanh()

    model.block = block
    optimizer = optfuse.fuse(adamw(model.parameters()), mode="backward", bucket_bytes=1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    refused(loss_of(model, 0).backward, "the state of ", "already updated it")


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


@reentrant_or_not
def test_an_update_that_waits_for_others(reentrant):
    """So small ones are made together behind the pass, and the block reads the old weight."""
    same(script_of("detach", reentrant), "backward")


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


@reentrant_or_not
def test_other_uses_inside_of_a_block(reentrant):
    """A tensor like the weight has none of its numbers, and a hook runs behind the block."""

    def script(wrap):
        layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        optimizer = wrap(adamw(layers.parameters()))
        head = layers[2]

        def block(h):
            h = layers[1](h) + torch.ones_like(head.weight)[0] + head.weight.new_ones(6)
            if h.requires_grad:
                h.register_hook(lambda grad: grad + 0 * head.weight.detach()[0])
            return h.tanh()

        for i in range(4):
            optimizer.zero_grad()
            h = checkpoint(block, layers[0](batch(i)[0]), use_reentrant=reentrant)
            loss = head(h).square().mean()
            loss.backward()
            optimizer.step()
            yield "loss", loss
            del loss, h
        yield from everything(layers, optimizer)

    same(script, "backward", bucket_bytes=1)


@pytest.mark.parametrize("bucket_bytes", (0, 1))
def test_a_weight_that_is_given_to_the_block_is_equal(bucket_bytes):
    def script(wrap):
        first, body, head = model = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        optimizer = wrap(adamw(model.parameters()))
        for i in range(4):
            optimizer.zero_grad()
            h = first(batch(i)[0])
            weight = head.weight.detach()
            h = checkpoint(lambda h, w: linear(body(h), w), h, weight, use_reentrant=False)
            del weight
            loss = head(h).square().mean()
            loss.backward()
            optimizer.step()
            yield "loss", loss
            del loss, h
        yield from everything(model, optimizer)

    same(script, "backward", bucket_bytes=bucket_bytes)


def test_a_block_inside_of_a_block():
    """Its weights have their gradients from there, and are equal."""

    def script(wrap):
        layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        optimizer = wrap(adamw(layers.parameters()))

        def inner(h):
            return layers[2](h).tanh()

        def outer(h):
            return checkpoint(inner, layers[1](h).tanh(), use_reentrant=False)

        for i in range(4):
            optimizer.zero_grad()
            h = checkpoint(outer, layers[0](batch(i)[0]), use_reentrant=False)
            loss = layers[3](h).square().mean()
            loss.backward()
            optimizer.step()
            yield "loss", loss
            del loss, h
        yield from everything(layers, optimizer)

    same(script, "backward", bucket_bytes=1)


def test_passes_over_parts_of_the_parameters():
    """The second one computes the block again, whose weights the first one has updated."""

    def passes(layers, optimizer, i):
        optimizer.zero_grad()
        h = layers[0](batch(i)[0]).tanh()
        loss = checkpoint(layers[1], h, use_reentrant=False).square().mean()
        loss.backward(inputs=list(layers[1].parameters()), retain_graph=True)
        loss.backward(inputs=list(layers[0].parameters()))
        optimizer.step()

    def script(wrap):
        layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        optimizer = wrap(adamw(layers.parameters()))
        for i in range(3):
            passes(layers, optimizer, i)
        yield from everything(layers, optimizer)

    layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
    optimizer = optfuse.fuse(adamw(layers.parameters()), mode="backward", bucket_bytes=1)
    refused(lambda: passes(layers, optimizer, 0), "already updated it")
    same(script, "forward")


def test_a_hook_reads_the_new_weight():
    """The layer behind it has its gradients by then: as docs/hazards.md says."""
    first, head = layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
    optimizer = optfuse.fuse(adamw(layers.parameters()), mode="backward", bucket_bytes=1)
    before, seen = head.weight.detach().clone(), []
    h = first(batch(0)[0])
    h.register_hook(lambda _: seen.append(head.weight.detach().clone()))
    head(h.tanh()).square().mean().backward()
    optimizer.step()
    assert torch.equal(seen[0], head.weight) and not torch.equal(seen[0], before)


def test_a_thread_of_a_block_reads_the_new_weight():
    """Likewise: who looks from another thread is not known to be of the block."""
    model, seen = Model("norm", False), []

    def block(h):
        thread = threading.Thread(target=lambda: seen.append(model.head.weight.detach().clone()))
        thread.start()
        thread.join()
        return model.body(h).tanh()

    model.block = block
    optimizer = optfuse.fuse(adamw(model.parameters()), mode="backward", bucket_bytes=1)
    loss_of(model, 0).backward()
    optimizer.step()
    before, again = seen
    assert torch.equal(again, model.head.weight) and not torch.equal(again, before)
