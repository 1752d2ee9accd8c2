# SPDX-License-Identifier: BSD-3-Clause
"""Idioms of scripts between backward() and the next one, where gradients are promises."""

import copy
import gc
import io
import os

import pytest
import torch
from common import adamw, assert_same, everything, python_ok, sgd
from torch import nn

import optfuse
from promises.counted import total
from promises.scripted import STEPS, WIDTH, equal, first, loss_of, script_of, train, wide


def idioms():
    def zero_early(model, optimizer, i):
        loss = loss_of(model, i)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def zeros(model, optimizer, i):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, i).backward()
        optimizer.step()

    def no_step(model, optimizer, i):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        if i != 1:
            optimizer.step()

    def clip(model, optimizer, i):
        train(model, optimizer, i, lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))

    def our_clip(model, optimizer, i):
        train(model, optimizer, i, lambda: optfuse.clip_grad_norm_(model.parameters(), 0.1))

    def clip_value(model, optimizer, i):
        train(model, optimizer, i, lambda: nn.utils.clip_grad_value_(model.parameters(), 1e-3))

    def flush(model, optimizer, i):
        train(model, optimizer, i)
        if getattr(optimizer, "_optfuse_link", None):
            optfuse.flush(optimizer)

    def flush_before(model, optimizer, i):
        def flush_now():
            if getattr(optimizer, "_optfuse_link", None):
                optfuse.flush(optimizer)

        train(model, optimizer, i, flush_now)
        yield "gradient", first(model).grad

    def copies(model, optimizer, i):
        seen = []

        def look():
            twin = copy.deepcopy(model)
            seen.append([p.grad for p in twin.parameters()])
            file = io.BytesIO()
            torch.save(first(model).grad, file)
            file.seek(0)
            seen.append(torch.load(file))

        train(model, optimizer, i, look)
        yield "copies", seen

    def closure(model, optimizer, i):
        def close():
            optimizer.zero_grad()
            loss = loss_of(model, i)
            loss.backward()
            return loss

        yield "loss", optimizer.step(close)

    def moved(model, optimizer, i):
        train(model, optimizer, i)
        first(model).grad = first(model).grad * 2 if i == 1 else None

    def state(model, optimizer, i):
        train(model, optimizer, i)
        optimizer.load_state_dict(optimizer.state_dict())

    def replaced(model, optimizer, i):
        train(model, optimizer, i, lambda: first(model).grad.set_(torch.ones(WIDTH, WIDTH)))

    def resized(model, optimizer, i):
        def shrink():
            first(model).grad.data.mul_(0.5)
            first(model).grad.data = first(model).grad.data * 2

        train(model, optimizer, i, shrink)

    return dict(locals())


@pytest.mark.parametrize("idiom", idioms())
def test_idioms(idiom):
    equal(script_of(idioms()[idiom]), "forward")


def test_scaled_losses():
    def script(wrap):
        model = wide()
        optimizer = wrap(adamw(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for i in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, i)).backward()
            if i == 1:
                scaler.unscale_(optimizer)
                yield "norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        yield from everything(model, optimizer)

    equal(script, "forward", made=True)


def test_two_optimizers():
    def script(wrap):
        model = wide()
        halves = list(model.parameters())
        optimizers = [wrap(adamw(halves[:3])), wrap(sgd(halves[3:]))]
        for i in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, i).backward()
            for optimizer in optimizers:
                optimizer.step()
        yield from everything(model, optimizers[0])

    equal(script, "forward", panels=True)


def test_unfuse_leaves_gradients_that_can_be_read():
    torch.manual_seed(0)
    stock = wide()
    model = copy.deepcopy(stock)
    optimizer = optfuse.fuse(adamw(model.parameters()))
    for m in (stock, model):
        loss_of(m, 0).backward()
    optfuse.unfuse(optimizer)
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        assert_same("gradient", ours.grad, theirs.grad)


def test_a_gradient_outlives_model_and_optimizer():
    torch.manual_seed(0)
    stock = wide()
    model = copy.deepcopy(stock)
    optimizer = optfuse.fuse(adamw(model.parameters()))
    for m in (stock, model):
        loss_of(m, 0).backward()
    grad, theirs = first(model).grad, first(stock).grad
    assert total(optimizer, "promised") > 0
    del model, optimizer
    gc.collect()
    assert_same("gradient", grad, theirs)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_finds_gradients():
    code = """
import os, copy, torch, optfuse
from torch import nn
torch.manual_seed(0)
stock = nn.Linear(40, 40)
model = copy.deepcopy(stock)
optimizer = optfuse.fuse(torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
x = torch.randn(5, 40)
for m in (stock, model):
    m(x).square().sum().backward()
assert sum(layer.promised for layer in optfuse.summary(optimizer).promised) == 1
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(stock.weight.grad, model.weight.grad) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    python_ok(code, OPTFUSE_PRODUCTS="force")
