# SPDX-License-Identifier: BSD-3-Clause
"""A class's own step() and the gradients: the update uses those of step(), clipped,
scaled and added up as in stock."""

import contextlib

import pytest
import torch
from common import everything, loss_of, net, same, train
from own_classes import Numbers, Stateless, Tensors
from own_scripts import MODES, momentum, training
from torch import nn
from torch.optim import Adafactor

import optfuse


@pytest.mark.parametrize("make", [Adafactor, momentum])
def test_the_gradient_of_step_is_used_whatever_becomes_of_it(make):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        for i in range(4):
            train(model, optimizer, i)
        wrap.pending()
        optimizer.zero_grad()
        wrap.pending()
        for p in model.parameters():
            p.grad = torch.ones(p.shape)
        wrap.pending()
        yield from everything(model, optimizer)
        yield "gradients", [p.grad for p in model.parameters()]

    same(script)


def test_gradients_that_the_class_changes_are_seen_changed():
    def script(wrap):
        model = net()
        optimizer = wrap(Stateless(model.parameters()))
        for i in range(4):
            train(model, optimizer, i)
            wrap.pending() if i else None
            yield "gradients", [p.grad for p in model.parameters()]
        train(model, optimizer, 5)
        yield "norm", nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        train(model, optimizer, 6)
        norm = optfuse.clip_grad_norm_ if wrap.fused else nn.utils.clip_grad_norm_
        yield "norm", norm(model.parameters(), 1e-3)
        yield "gradients", [p.grad for p in model.parameters()]

    same(script)


def test_gradients_that_are_kept_and_added_to():
    same(training(Adafactor, set_to_none=False))

    def never_zeroed(wrap):
        model = net()
        optimizer = wrap(Tensors(model.parameters()))
        for i in range(8):
            loss_of(model, i).backward()
            optimizer.step()
        yield from everything(model, optimizer)

    same(never_zeroed)


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("make", [Adafactor, momentum, Numbers])
def test_clipping(make, ours):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        clip = optfuse.clip_grad_norm_ if ours and wrap.fused else nn.utils.clip_grad_norm_
        for i in range(6):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            yield "norm", clip(model.parameters(), 0.01)
            optimizer.step()
        yield "gradients", [p.grad for p in model.parameters()]
        yield from everything(model, optimizer)

    same(script, prove=make is not Numbers)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("make", [Adafactor, momentum])
def test_loss_scaling(make, unscale):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        for i in range(8):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, i)).backward()
            if i == 4:
                model[0].weight.grad[0, 0] = float("inf")
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            yield "scale", scaler.get_scale()
        yield from everything(model, optimizer)

    same(script)


@pytest.mark.parametrize("mode", MODES)
def test_accumulation(mode):
    def script(wrap):
        model = net()
        optimizer = wrap(Adafactor(model.parameters()))
        for i in range(6):
            optimizer.zero_grad()
            with optfuse.accumulate(optimizer) if wrap.fused else contextlib.nullcontext():
                loss_of(model, 2 * i).backward()
            loss_of(model, 2 * i + 1).backward()
            optimizer.step()
        yield from everything(model, optimizer)

    same(script, mode)
