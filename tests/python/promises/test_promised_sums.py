# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that several uses of a weight, or several backward passes, add up: the sum of promises
is a promise."""

import time

import pytest
import torch
import torch.nn.functional as F
from common import adamw, assert_same, everything, sgd
from torch import nn

import optfuse
from promises.counted import promises_of
from promises.scripted import (
    MODES,
    MULTIPLIES,
    WIDTH,
    batch,
    equal,
    first,
    loss_of,
    script_of,
    train,
    wide,
)


@pytest.mark.parametrize("times", (2, 3, 5))
@pytest.mark.parametrize("make", (adamw, sgd))
@pytest.mark.parametrize("mode", MODES)
def test_several_passes(times, make, mode):
    def script(wrap):
        model = wide()
        options = {"accumulate": times} if wrap.fused and mode == "backward" else {}
        optimizer = wrap(make(model.parameters()), **options)
        for i in range(3 * times):
            loss_of(model, i).backward()
            if i % times == times - 1:
                optimizer.step()
                optimizer.zero_grad()
        yield from everything(model, optimizer)

    equal(script, mode, panels=True, made=False)


class Cell(nn.Module):
    """The weights are used once for each element of a sequence."""

    def __init__(self):
        super().__init__()
        self.inputs, self.states = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        state = torch.zeros(2, WIDTH)
        for part in x.split(2):
            state = (self.inputs(part) + self.states(state)).tanh()
        return state


@pytest.mark.parametrize("mode", MODES)
def test_a_recurrent_network(mode):
    def iteration(model, optimizer, i):
        train(model, optimizer, i, loss=lambda m, i: m(batch(i, 8)).square().mean())

    equal(script_of(iteration, model=Cell), mode, panels=True, made=False)


def penalized(loss, x):
    """With the norm of the loss's slope, through which backward goes again."""
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


@pytest.mark.parametrize("times", (1, 2))
@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_penalty_of_a_recurrent_network(mode, times):
    """Stock adds up what each use of a weight has before it adds the uses."""

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        x = batch(i, 8).requires_grad_()
        loss = model(x).square().mean()
        for _ in range(times):
            loss = penalized(loss, x)
        loss.backward()
        optimizer.step()

    equal(script_of(iteration, model=Cell), mode, promised=None)


@pytest.mark.parametrize("schedule", ("stock", "last"))
def test_a_gradient_penalty_of_a_reordered_network(schedule):
    def gradients(reordered):
        torch.manual_seed(0)
        model, x = Cell(), batch(0, 8).requires_grad_()
        reordering = optfuse.reorder(model, schedule) if reordered else None
        penalized(model(x).square().mean(), x).backward()
        if reordering is not None:
            reordering.remove()
        return [p.grad for p in model.parameters()]

    assert_same("gradients", gradients(True), gradients(False))


@pytest.mark.parametrize("padding", (None, 2))
def test_an_embedding_tied_to_the_output(padding):
    def loss(model, i):
        tokens = torch.randint(50, (6,), generator=torch.Generator().manual_seed(i))
        return F.linear(model(tokens).tanh(), model.weight).square().mean()

    def iteration(model, optimizer, i):
        train(model, optimizer, i, loss=loss)

    model = lambda: nn.Embedding(50, 24, padding)  # noqa: E731
    equal(script_of(iteration, model=model, steps=5), "forward", panels=True)


@pytest.mark.parametrize("mode", MODES)
def test_several_uses_under_autocast(mode):
    """They share the weight's cast, so the sum is rounded to 16 bits."""

    def loss(model, i):
        with torch.autocast("cpu", torch.bfloat16):
            y = sum(model(batch(i) * k) for k in (1.0, 0.3, -0.7))
        return y.float().square().mean()

    promised = MULTIPLIES[torch.bfloat16]
    equal(script_of(lambda *of: train(*of, loss=loss)), mode, promised=promised)


def test_special_numbers():
    """Sums of infinities, of numbers that are no longer normal, and of zeros of both signs."""
    kinds = (0.0, -0.0, 1e-42, -1e-42, float("inf"), float("-inf"), 1.0)

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        for k in range(2):
            x = torch.ones(1, WIDTH)
            choice = torch.randint(
                len(kinds), (1, WIDTH), generator=torch.Generator().manual_seed(k)
            )
            model[0](x).backward(torch.tensor(kinds)[choice])
        yield "gradient", first(model).grad
        optimizer.step()

    make = lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, fused=True)  # noqa: E731
    equal(script_of(iteration, make), "forward", promised=True)


def events():
    def looks(model, k):
        yield "gradient", first(model).grad

    def looks_at_an_alias(model, k):
        yield "gradient", first(model).grad.data

    def writes(model, k):
        first(model).grad.mul_(0.5)
        yield "written", None

    def threads(model, k):
        torch.set_num_threads(3 - torch.get_num_threads())
        yield "threads", None

    def drops_one(model, k):
        model[2].weight.grad = None
        yield "dropped", None

    return {
        "look": looks,
        "look at an alias": looks_at_an_alias,
        "write": writes,
        "other threads": threads,
        "drop": drops_one,
    }


@pytest.mark.parametrize("event", events())
def test_between_two_passes(event):
    def iteration(model, optimizer, i):
        torch.set_num_threads(2)
        optimizer.zero_grad()
        for k in range(3):
            loss_of(model, 3 * i + k).backward()
            if k == 1:
                yield from events()[event](model, k)
        optimizer.step()

    before = torch.get_num_threads()
    try:
        equal(script_of(iteration), "forward", promised=True)
    finally:
        torch.set_num_threads(before)


def test_a_gradient_that_nobody_zeroes():
    """step() has left an update pending when the next pass adds to its gradient."""

    def iteration(model, optimizer, i):
        loss_of(model, i).backward()
        optimizer.step()

    equal(script_of(iteration, steps=4), "forward", promised=True)


def test_a_tensor_that_holds_the_gradient_sees_the_sum():
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        held, version = first(model).grad, first(model).grad._version
        loss_of(model, i + 1).backward()
        yield "the same", (held is first(model).grad, held._version - version, held)
        optimizer.step()

    equal(script_of(iteration), "forward", promised=True)


def test_a_sum_that_is_no_longer_small_is_computed(monkeypatch):
    """Its factors are kept in the gradient's place, and may take half of its bytes: those of some 9
    passes with 16 rows each."""
    monkeypatch.setenv("OPTFUSE_PRODUCTS", "auto")
    model = nn.Linear(600, 600, bias=False)
    optimizer = optfuse.fuse(adamw(model.parameters()))

    def step(passes):
        optimizer.zero_grad()
        for k in range(passes):
            model(torch.full((16, 600), 0.01 * k)).sum().backward()
        optimizer.step()
        optfuse.flush()
        return promises_of(optimizer)[0]

    until = time.monotonic() + 30
    while step(4).panels == 0:
        if time.monotonic() > until:
            pytest.skip("panels have other bits here, or are slower")
    before = step(4)
    after = step(12)
    assert (after.panels, after.made) == (before.panels, before.made + 2)


@pytest.mark.parametrize("hook", (lambda g: g + g, lambda g: g.add_(g)), ids=("new", "in place"))
@pytest.mark.parametrize("mode", MODES)
def test_a_hook_adds_a_gradient_to_itself(hook, mode):
    """One promise becomes one."""

    def script(wrap):
        model = wide()
        first(model).register_hook(hook)
        optimizer = wrap(adamw(model.parameters()))
        for i in range(3):
            train(model, optimizer, i)
        yield from everything(model, optimizer)
        for layer in promises_of(optimizer) if wrap.fused else ():
            assert layer.promised == layer.panels + layer.made == 3, layer

    equal(script, mode, panels=True)
