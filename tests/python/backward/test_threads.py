# SPDX-License-Identifier: BSD-3-Clause
"""Backward mode: threads that are in backward at the same time, each with parameters of
its own. Their passes take turns, layer by layer."""

import threading
from collections import defaultdict
from functools import partial

import pytest
import torch
from common import adamw, assert_same, everything, loss_of, net, same, sgd, weights

import optfuse

STEPS = 3
SECONDS = 60  # until a thread that waits for another one gives up


def together(*calls, failed=lambda: None):
    """Runs each on a thread of its own, and raises what the first of them raised."""
    raised = []

    def run(call):
        try:
            call()
        except BaseException as error:
            raised.append(error)
            failed()

    threads = [threading.Thread(target=run, args=(call,), name="caller") for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def passes(models, i):
    """One pass for each model, by turns: neither is more than a layer ahead. Those of a GPU share a
    thread of autograd's, where one that waited would wait for itself: they take turns anyway."""
    barrier = threading.Barrier(len(models))

    def wait(*_):
        if threading.current_thread().name == "caller":
            barrier.wait(SECONDS)

    layers = [layer for model in models for layer in model]
    hooks = [layer.register_full_backward_hook(wait) for layer in layers]
    calls = [loss_of(model, 2 * i + k).backward for k, model in enumerate(models)]
    together(*calls, failed=barrier.abort)
    for hook in hooks:
        hook.remove()


def parameters(models):
    return [p for model in models for p in model.parameters()]


@pytest.fixture
def models():
    torch.manual_seed(0)
    return [net(), net()]


def test_two_passes_are_two_of_three(models):
    optimizer = optfuse.fuse(adamw(parameters(models)), optfuse.Backward(accumulate=3))
    before = [weights(model) for model in models]
    passes(models, 0)
    assert optfuse.summary(optimizer).created == 0, "a pass that only adds has updated"
    assert_same("weights", [weights(model) for model in models], before)


@pytest.mark.parametrize("make", (adamw, sgd))
@pytest.mark.parametrize("rounds", (1, 2, 3))
def test_counted_passes(make, rounds):
    """So many of each thread, and their sum makes a step."""

    def script(wrap):
        models = [net(), net()]
        optimizer = wrap(make(parameters(models)))
        for i in range(STEPS):
            for k in range(rounds):
                passes(models, i * rounds + k)
            optimizer.step()
            optimizer.zero_grad()
            yield "models", [dict(model.state_dict()) for model in models]
            yield "state", optimizer.state_dict()

    same(script, "backward", accumulate=2 * rounds)


def test_a_pass_by_itself_is_the_last_of_three():
    def script(wrap):
        models = [net(), net()]
        optimizer = wrap(adamw(parameters(models)))
        for i in range(STEPS):
            together(*(loss_of(model, 3 * i + k).backward for k, model in enumerate(models)))
            loss_of(models[i % 2], 3 * i + 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "models", [dict(model.state_dict()) for model in models]

    same(script, "backward", accumulate=3)


@pytest.mark.parametrize("accumulate", (1, 2))
def test_optimizers_of_their_own(accumulate):
    def script(wrap):
        models = [net(), net()]
        first, second = models
        optimizers = [wrap(adamw(first.parameters())), wrap(sgd(second.parameters()))]
        for i in range(STEPS):
            for k in range(accumulate):
                passes(models, i * accumulate + k)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for model, optimizer in zip(models, optimizers, strict=True):
            yield from everything(model, optimizer)

    same(script, "backward", accumulate=accumulate)


def test_marked_passes():
    def script(wrap):
        models = [net(), net()]
        optimizer = wrap(adamw(parameters(models)))

        def add(loss):
            with optfuse.accumulate(optimizer):
                loss.backward()

        for i in range(STEPS):
            losses = [loss_of(model, 9 * i + k) for k, model in enumerate(models)]
            together(*(partial(add, loss) for loss in losses))
            passes(models, i)
            optimizer.step()
            optimizer.zero_grad()
        for model in models:
            yield from everything(model, optimizer)

    same(script, "backward")


class Slow(defaultdict):
    """Optimizer state that is made slowly: its thread waits before it tells the library."""

    def __init__(self, made, go_on):
        super().__init__(dict)
        self.made, self.go_on = made, go_on

    def __getitem__(self, param):
        entry = super().__getitem__(param)
        if entry and threading.current_thread().name == "slow":
            self.made.set()
            self.go_on.wait(1)
        return entry


def test_state_that_another_thread_is_making():
    """The first update of SGD takes the gradient for its momentum, without dampening."""

    def script(wrap):
        params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
        optimizer = wrap(sgd(params, dampening=0.5))
        made, go_on = threading.Event(), threading.Event()
        optimizer.state = Slow(made, go_on)
        slow = threading.Thread(target=(params[0] * 3).sum().backward, name="slow")
        slow.start()
        made.wait(1 if wrap.fused else 0)
        (params[1] * 2).sum().backward()
        go_on.set()
        slow.join()
        optimizer.step()
        yield "parameters", [p.detach() for p in params]
        yield "momentum", [optimizer.state[p]["momentum_buffer"] for p in params]

    same(script, "backward")
