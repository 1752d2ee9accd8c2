# SPDX-License-Identifier: BSD-3-Clause
"""torch.autograd.graph.allow_mutation_on_saved_tensors(): a graph goes on with the weights that it
has saved, whatever step() has made of them since."""

import pytest
import torch
from common import adamw, batch, everything, net, refused, same, sgd
from style_classes import AdaBelief
from torch.autograd.graph import allow_mutation_on_saved_tensors

import optfuse


@pytest.mark.parametrize("make", (adamw, sgd, AdaBelief))
@pytest.mark.parametrize("steps", (1, 2))
def test_a_graph_from_before_step(make, steps):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        for i in range(3):
            with allow_mutation_on_saved_tensors():
                optimizer.zero_grad()
                x = batch(i)[0].requires_grad_()
                loss = model(x).square().mean()
                loss.backward(retain_graph=True)
                for _ in range(steps):
                    optimizer.step()
                if make is not AdaBelief:  # whose step() under a mode is its own
                    wrap.pending()
                yield "slope", torch.autograd.grad(loss, x, retain_graph=True)
                optimizer.zero_grad()
                loss.backward()
                yield "gradients", [p.grad for p in model.parameters()]
                del loss, x
            optimizer.step()
        yield from everything(model, optimizer)

    same(script)


def test_a_graph_that_has_saved_optimizer_state():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        factor = torch.ones((), requires_grad=True)
        for i in range(3):
            with allow_mutation_on_saved_tensors():
                optimizer.zero_grad()
                model(batch(i)[0]).square().mean().backward()
                averages = [s["exp_avg"] for s in optimizer.state.values()]
                total = sum((average * factor).sum() for average in averages) + 0 * factor
                del averages
                optimizer.step()
                yield "slope", torch.autograd.grad(total, factor)
                del total
        yield from everything(model, optimizer)

    same(script)


def test_backward_mode_refuses():
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()), mode="backward")
    before = [p.detach().clone() for p in model.parameters()]
    with allow_mutation_on_saved_tensors():
        loss = model(batch(0)[0]).square().mean()
        refused(loss.backward, "allow_mutation_on_saved_tensors")
    assert all(map(torch.equal, before, model.parameters()))
    for p in model.parameters():
        p.grad = None
    model(batch(0)[0]).square().mean().backward()
    optimizer.step()
    assert optfuse.summary(optimizer).created == len(before)


def test_training_inside_of_it():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        with allow_mutation_on_saved_tensors():
            for i in range(4):
                optimizer.zero_grad()
                model(batch(i)[0]).square().mean().backward()
                optimizer.step()
                wrap.pending()
        yield from everything(model, optimizer)

    same(script)
