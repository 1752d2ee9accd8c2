# SPDX-License-Identifier: BSD-3-Clause
"""Whoever looks at a gradient finds it clipped, before step() and after it."""

import pytest
from clipped import LIMIT, STEPS, clip
from common import adamw, sgd
from legal import backward, legal, loss_of, net

import optfuse


def looks(before_step=(), after_step=(), between=()):
    """Gradients of these layers are read or written around step()."""

    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            backward(model, optimizer, i)
            clip(optimizer)
            for layer in before_step:
                yield "before step()", model[layer].weight.grad
            for layer in between:
                model[layer].weight.grad.mul_(0.5)
            optimizer.step()
            for layer in after_step:
                yield "after step()", model[layer].weight.grad
            if i % 2:
                yield "weights", list(model.parameters())
        yield "gradients", [p.grad for p in model.parameters()]

    return script


LOOKS = {
    "before": looks(before_step=(0, 4)),
    "after": looks(after_step=(2,)),
    "both": looks(before_step=(0,), after_step=(0, 2)),
    "written": looks(between=(2,)),
}


@pytest.mark.parametrize("script", LOOKS.values(), ids=LOOKS)
def test_a_gradient_that_is_looked_at_is_clipped(script):
    legal(script)


def test_clipping_twice():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            backward(model, optimizer, i)
            yield "norm", clip(optimizer)
            yield "norm", clip(optimizer, LIMIT / 3)
            optimizer.step()
        yield "weights", list(model.parameters())

    legal(script)


def test_one_gradient_is_clipped_alone_and_then_all():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            backward(model, optimizer, i)
            yield "norm", optfuse.clip_grad_norm_(model[0].weight, LIMIT)
            yield "norm", clip(optimizer)
            optimizer.step()
        yield "weights", list(model.parameters())

    legal(script)


def test_a_clipped_gradient_is_added_to():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            clip(optimizer)
            loss_of(model, i).backward()  # without zero_grad()
            clip(optimizer)
            optimizer.step()
        yield "gradients", [p.grad for p in model.parameters()]
        yield "weights", list(model.parameters())

    legal(script)


def test_two_optimizers_step_with_one_clipped_gradient():
    def script(wrap):
        model = net()
        first = wrap(adamw(model.parameters()))
        second = wrap(sgd(model.parameters()))
        for i in range(STEPS):
            backward(model, first, i)
            yield "norm", clip(first)
            first.step()
            second.step()
            if i % 2:
                yield "gradients", [p.grad for p in model.parameters()]
        yield "weights", list(model.parameters())

    legal(script)
