# SPDX-License-Identifier: BSD-3-Clause
"""Gradient accumulation: several backward passes make one step, in both modes,
with the results of stock."""

import copy
import gc
import pickle

import pytest
import torch
from common import (
    adamw,
    everything,
    fused_backward,
    loss_of,
    net,
    refused,
    same,
    sgd,
    weights,
)
from scripts import trained
from torch import nn
from torch.utils.checkpoint import checkpoint

import optfuse

MICRO = 3
STEPS = 4


def gradients(model):
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("mode", ("forward", "backward"))
@pytest.mark.parametrize("make", (adamw, sgd))
def test_counted_passes(mode, make):
    """A loop that can't be edited; the last batches make a step of fewer passes."""

    def iteration(model, optimizer, i):
        (loss_of(model, i) / MICRO).backward()
        if i % MICRO == MICRO - 1 or i == STEPS * MICRO + 1:
            optimizer.step()
            optimizer.zero_grad()
            yield from everything(model, optimizer)

    options = {"accumulate": MICRO} if mode == "backward" else {}
    same(trained(make, iteration=iteration, steps=STEPS * MICRO + 2), mode, **options)


def test_the_update_runs_in_the_last_pass_only():
    model, optimizer = fused_backward()
    before = weights(model)
    with optfuse.accumulate(optimizer):
        loss_of(model, 0).backward()
        loss_of(model, 1).backward()
    assert optfuse.summary(optimizer).created == 0
    assert all((p == before[k]).all() for k, p in model.state_dict().items())
    loss_of(model, 2).backward()
    assert optfuse.summary(optimizer).created == len(before)
    optimizer.step()
    assert optfuse.summary(optimizer).created == len(before)


class Branches(nn.Module):
    """A micro-batch goes through one of two branches."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, branch):
        return self.last((self.first, self.second)[branch](x))


@pytest.mark.parametrize("mode", ("forward", "backward"))
@pytest.mark.parametrize("counted", (True, False))
def test_a_parameter_without_a_gradient_in_the_last_pass(mode, counted):
    def start(wrap):
        model = Branches()
        options = {"accumulate": 2} if counted and mode == "backward" else {}
        optimizer = wrap(adamw(model.parameters()), **options)
        return model, optimizer

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        if counted:
            model(torch.full((2, 6), 0.5 + i), 0).sum().backward()
        else:
            with optfuse.accumulate(optimizer):
                model(torch.full((2, 6), 0.5 + i), 0).sum().backward()
        model(torch.full((2, 6), 0.1 - i), i % 2).sum().backward()
        optimizer.step()
        yield from everything(model, optimizer)

    same(trained(start=start, iteration=iteration), mode)


@pytest.mark.parametrize("mode", ("forward", "backward"))
def test_a_step_without_a_last_pass(mode):
    """Every pass was marked: step() does it all, and shows the gradients."""

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        with optfuse.accumulate(optimizer):
            loss_of(model, i).backward()
            yield "gradients", gradients(model)
            optimizer.step()
            yield from everything(model, optimizer)

    same(trained(iteration=iteration), mode, prove=mode == "forward")


@pytest.mark.parametrize("mode", ("forward", "backward"))
def test_zero_grad_inside_throws_the_passes_away(mode):
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        with optfuse.accumulate(optimizer):
            loss_of(model, 2 * i).backward()
            optimizer.zero_grad(set_to_none=i % 2 == 0)
            loss_of(model, 2 * i + 100).backward()
        loss_of(model, 2 * i + 1).backward()
        optimizer.step()
        yield from everything(model, optimizer)

    same(trained(iteration=iteration), mode)


def test_zero_grad_starts_the_count_over():
    def iteration(model, optimizer, i):
        loss_of(model, 10 + i).backward()  # a batch that is thrown away
        optimizer.zero_grad()
        loss_of(model, i).backward()
        loss_of(model, i + 100).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield from everything(model, optimizer)

    same(trained(iteration=iteration), "backward", accumulate=2)


def test_nested_contexts_and_exceptions():
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        with optfuse.accumulate(optimizer):
            try:
                with optfuse.accumulate(optimizer):
                    loss_of(model, i).backward()
                    raise KeyError
            except KeyError:
                pass
            loss_of(model, i + 10).backward()  # still inside the outer one
        loss_of(model, i + 20).backward()
        optimizer.step()
        yield from everything(model, optimizer)

    same(trained(iteration=iteration), "backward")


def test_several_optimizers_and_stock_ones():
    def script(wrap):
        model = net()
        first = wrap(adamw(model[:2].parameters()))
        second = wrap(sgd(model[2:4].parameters()), mode="forward")
        third = sgd(model[4:].parameters())
        for i in range(STEPS):
            for optimizer in (first, second, third):
                optimizer.zero_grad()
            with optfuse.accumulate(first, second, third):
                loss_of(model, i).backward()
            loss_of(model, i + 10).backward()
            for optimizer in (first, second, third):
                optimizer.step()
                yield from everything(model, optimizer)

    same(script, "backward")


def test_another_optimizer_goes_on_meanwhile():
    """Marking one optimizer's passes leaves the other one updating in each."""

    def script(wrap):
        slow, quick = net(), net()
        optimizers = [wrap(adamw(slow.parameters())), wrap(adamw(quick.parameters()))]
        for i in range(STEPS):
            with optfuse.accumulate(optimizers[0]):
                for micro in range(MICRO):
                    (loss_of(slow, i) + loss_of(quick, i + micro)).backward()
                    optimizers[1].step()
                    optimizers[1].zero_grad()
            loss_of(slow, i + 50).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            yield from everything(slow, optimizers[0])
            yield from everything(quick, optimizers[1])

    same(script, "backward")


class Half(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.net, self.reentrant = net(), reentrant

    def forward(self, x):
        middle = checkpoint(self.net[:3], x.requires_grad_(), use_reentrant=self.reentrant)
        return self.net[3:](middle)


@pytest.mark.parametrize("reentrant", (True, False))
def test_under_checkpointing(reentrant):
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        with optfuse.accumulate(optimizer):
            loss_of(model, i).backward()
        loss_of(model, i + 10).backward()
        optimizer.step()
        yield from everything(model, optimizer)

    same(trained(model=lambda: Half(reentrant), iteration=iteration), "backward")


def test_counting_under_checkpointing():
    def iteration(model, optimizer, i):
        loss_of(model, i).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
            yield from everything(model, optimizer)

    same(
        trained(model=lambda: Half(False), iteration=iteration, steps=2 * STEPS),
        "backward",
        accumulate=2,
    )


def test_counting_nested_passes_is_refused():
    model = Half(True)
    optimizer = optfuse.fuse(adamw(model.parameters()), optfuse.Backward(accumulate=2))
    refused(lambda: loss_of(model, 0).backward(), "reentrant", way_out="optfuse.accumulate(")
    optimizer.zero_grad()


def test_forgetting_it_raises():
    model, optimizer = fused_backward()
    loss_of(model, 0).backward()
    refused(lambda: loss_of(model, 1).backward(), "optfuse.accumulate(optimizer)")
    model.zero_grad()
    refused(lambda: loss_of(model, 1).backward(), "optfuse.accumulate(optimizer)")
    refused(optimizer.zero_grad, "optfuse.accumulate(optimizer)")


def test_adding_between_the_update_and_step_is_refused():
    model, optimizer = fused_backward()
    loss_of(model, 0).backward()
    model.zero_grad()
    with optfuse.accumulate(optimizer):
        refused(lambda: loss_of(model, 1).backward(), "call step() first")


def test_one_pass_more_than_counted_is_refused():
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()), optfuse.Backward(accumulate=2))
    for i in range(2):
        loss_of(model, i).backward()
    refused(lambda: loss_of(model, 2).backward())
    optimizer.step()


def test_counted_passes_are_not_marked():
    optimizer = optfuse.fuse(adamw(net().parameters()), optfuse.Backward(accumulate=2))
    with pytest.raises(optfuse.Error, match="accumulate=2"), optfuse.accumulate(optimizer):
        pass


def test_unfuse_inside_the_context():
    model, optimizer = fused_backward()
    with optfuse.accumulate(optimizer):
        loss_of(model, 0).backward()
        optfuse.unfuse(optimizer)
    kept = gradients(model)
    loss_of(model, 0).backward()
    assert all((g2 == 2 * g1).all() for g1, g2 in zip(kept, gradients(model), strict=True))


def test_the_context_keeps_the_optimizer():
    model, optimizer = fused_backward()
    with optfuse.accumulate(optimizer):
        del optimizer
        gc.collect()
        loss_of(model, 0).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_copies_count_and_pickles_are_stock():
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()), optfuse.Backward(accumulate=2))
    twin_model, twin = copy.deepcopy((model, optimizer))
    for i in range(2):
        loss_of(twin_model, i).backward()
        made = optfuse.summary(twin).created
        assert made == (6 if i else 0), f"{made} updates after pass {i} of 2"
    twin.step()
    assert type(pickle.loads(pickle.dumps(twin))) is torch.optim.AdamW
