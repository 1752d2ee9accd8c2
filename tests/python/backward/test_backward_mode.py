# SPDX-License-Identifier: BSD-3-Clause
"""Backward mode: the update runs inside backward(), and the gradient is gone
afterwards."""

import pytest
import torch
from common import (
    adamw,
    assert_same,
    batch,
    everything,
    fused_backward,
    loss_of,
    net,
    same,
    sgd,
    train,
    weights,
)
from scripts import trained
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import optfuse

STEPS = 6


@pytest.mark.parametrize("make", (adamw, sgd))
@pytest.mark.parametrize("set_to_none", (True, False))
def test_training_is_that_of_stock(make, set_to_none):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        for i in range(STEPS):
            yield "loss", train(model, optimizer, i, set_to_none)
            yield from everything(model, optimizer)

    same(script, mode="backward")


def test_the_update_runs_inside_backward():
    model, optimizer = fused_backward()
    before = weights(model)
    loss_of(model, 0).backward()
    assert all((p != before[k]).any() for k, p in model.state_dict().items())
    assert optfuse.summary(optimizer).created == len(before)


def test_layers_are_updated_while_backward_still_runs():
    """The last layer's weight is new when the gradient reaches the first, and its bias, which
    waits for the next weight. A weight fills a bucket on a GPU, too."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))
    optimizer = optfuse.fuse(adamw(model.parameters()), mode="backward")
    seen, created = [], []

    def look(*_):
        seen.append([p in optimizer.state for p in model.parameters()])
        created.append(optfuse.summary(optimizer).created)

    model[0].register_full_backward_pre_hook(look)
    model(torch.ones(2, 1024)).sum().backward()
    (updated,) = seen
    assert updated[2] and all(updated[4:]), updated
    assert created[0] >= 21, f"{created} of 11 weights and their biases, but for the last of these"


@pytest.mark.parametrize("make", (adamw, sgd))
def test_gradients_are_freed_during_backward(make):
    model = net()
    optimizer = optfuse.fuse(make(model.parameters()), mode="backward")
    storages = []
    for p in model.parameters():
        p.register_hook(lambda g: storages.append(StorageWeakRef(g.untyped_storage())))
    for i in range(2):
        optimizer.zero_grad()
        storages.clear()
        loss_of(model, i).backward()
        left = sum(not s.expired() for s in storages)
        assert storages and left == 0, f"{left} of {len(storages)} gradients are still there"
        optimizer.step()


def test_frozen_and_unused_parameters_stay():
    def script(wrap):
        model = net()
        model[0].weight.requires_grad_(False)
        model.unused = nn.Linear(3, 3)
        whole = nn.ModuleList([model, model.unused])
        model = model[:5]
        optimizer = wrap(adamw(whole.parameters()))
        for i in range(STEPS):
            train(model, optimizer, i)
        yield from everything(whole, optimizer)

    same(script, mode="backward")


def test_requires_grad_switched_on_later():
    def start(wrap):
        model = net()
        model[0].requires_grad_(False)
        optimizer = wrap(adamw(model.parameters()))
        return model, optimizer

    def iteration(model, optimizer, i):
        model[0].requires_grad_(i >= 2)
        train(model, optimizer, i)

    same(trained(start=start, iteration=iteration), mode="backward")


def test_gradients_set_by_hand_are_applied_by_step():
    def iteration(model, optimizer, i):
        if i % 2:
            train(model, optimizer, i)
        else:
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.1 * i)
            optimizer.step()

    same(trained(iteration=iteration), mode="backward")


def test_tied_weights():
    def script(wrap):
        embed = nn.Embedding(7, 6)
        optimizer = wrap(sgd(embed.parameters()))
        for i in range(STEPS):
            optimizer.zero_grad()
            (embed(torch.tensor([1, 2, i])) @ embed.weight.t()).square().sum().backward()
            optimizer.step()
        yield from everything(embed, optimizer)

    same(script, mode="backward")


def with_checkpoint(model, i):
    x, y = batch(i)
    hidden = checkpoint(model[:3], x, use_reentrant=False)
    return nn.functional.mse_loss(model[3:](hidden), y)


def with_autocast(model, i):
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, i)


def with_slope_of_the_input(model, i):
    x, y = batch(i)
    x.requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return nn.functional.mse_loss(out, y) + slope.square().sum()


@pytest.mark.parametrize("loss", (with_checkpoint, with_autocast, with_slope_of_the_input))
def test_ways_to_reach_backward(loss):
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        loss(model, i).backward()
        optimizer.step()

    same(trained(iteration=iteration), mode="backward")


def test_autograd_grad_makes_no_update():
    model, optimizer = fused_backward()
    before = weights(model)
    torch.autograd.grad(loss_of(model, 0), list(model.parameters()))
    assert_same("weights after autograd.grad", weights(model), before)
    assert optfuse.summary(optimizer).created == 0


# Hooks of others


@pytest.mark.parametrize("when", ("before fuse", "after fuse", "both"))
def test_hooks_of_others_fire(when):
    def script(wrap):
        model = net()
        calls = []

        def hook(name):
            for index, p in enumerate(model.parameters()):
                p.register_post_accumulate_grad_hook(lambda _, i=index: calls.append((name, i)))
                p.register_hook(lambda g, i=index: calls.append((f"{name}, tensor", i)))

        if when != "after fuse":
            hook("before")
        optimizer = wrap(adamw(model.parameters()))
        if when != "before fuse":
            hook("after")
        for i in range(STEPS):
            calls.clear()
            train(model, optimizer, i)
            yield "calls", sorted(calls)
        yield from everything(model, optimizer)

    same(script, mode="backward")


def test_a_hook_from_before_fuse_sees_the_gradient():
    def script(wrap):
        model = net()
        norms = {}
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(
                lambda p, name=name: norms.__setitem__(name, p.grad.norm().item())
            )
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            train(model, optimizer, i)
            yield "norms", dict(norms)

    same(script, mode="backward")


def test_a_tensor_hook_that_changes_the_gradient():
    def script(wrap):
        model = net()
        optimizer = wrap(sgd(model.parameters()))
        for p in model.parameters():
            p.register_hook(lambda g: g * 0.5)
        for i in range(STEPS):
            train(model, optimizer, i)
        yield from everything(model, optimizer)

    same(script, mode="backward")


def test_hooks_removed_again_leave_ours():
    def script(wrap):
        model = net()
        hook = nn.Parameter.register_post_accumulate_grad_hook
        handles = [hook(p, lambda _: None) for p in model.parameters()]
        optimizer = wrap(adamw(model.parameters()))
        handles += [hook(p, lambda _: None) for p in model.parameters()]
        train(model, optimizer, 0)
        for handle in handles:
            handle.remove()
        for i in range(1, STEPS):
            train(model, optimizer, i)
        yield from everything(model, optimizer)

    same(script, mode="backward")


def test_an_evicted_hook_is_noticed_at_step():
    """Assigning this attribute drops every hook of the slot, ours included."""

    def iteration(model, optimizer, i):
        if i == 2:
            for p in model.parameters():
                p._post_accumulate_grad_hooks = {}
        train(model, optimizer, i)

    same(trained(iteration=iteration), mode="backward")
