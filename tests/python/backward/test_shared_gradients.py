# SPDX-License-Identifier: BSD-3-Clause
"""Backward mode: a gradient in memory that others know, as a part of one flat buffer, is
left to step(). Whoever writes to that memory before step() is obeyed, as in stock."""

import pytest
import torch
from common import adamw, batch, everything, loss_of, net, same, sgd
from torch import nn

import optfuse

STEPS = 4
WIDTH = 160  # a layer of more elements than the parameters that wait for each other


def in_numpy(flat, begin, end, param):
    """The buffer is that of an array, and PyTorch's own reference to it is one."""
    return torch.from_numpy(flat.numpy()[begin:end]).view_as(param)


def one_each(flat, begin, end, param):
    """A buffer of its own for each parameter, known by another tensor of all of it."""
    whole = flat.new_zeros(end - begin)
    KEPT.append(whole)
    return whole.detach().view(param.shape).detach()


KEPT = []
GRADIENTS = {
    "views": lambda flat, begin, end, param: flat[begin:end].view_as(param),
    "detached": lambda flat, begin, end, param: flat[begin:end].view_as(param).detach(),
    "data": lambda flat, begin, end, param: flat.data[begin:end].view_as(param).data,
    "numpy": in_numpy,
    "one each": one_each,
}


def into_a_buffer(params, kind):
    """Gives them gradients in one buffer; what to multiply to multiply all of them."""
    flat = torch.zeros(sum(p.numel() for p in params))
    KEPT.clear()
    end = 0
    for p in params:
        begin, end = end, end + p.numel()
        p.grad = GRADIENTS[kind](flat, begin, end, p)
    return [*KEPT] or [flat]


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("make", (adamw, sgd))
@pytest.mark.parametrize("width", (6, WIDTH), ids=("small", "large"))
def test_a_buffer_of_gradients_is_scaled_before_step(kind, make, width):
    def script(wrap):
        model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width))
        optimizer = wrap(make(model.parameters()))
        buffers = into_a_buffer(list(model.parameters()), kind)
        for i in range(STEPS):
            model(batch(i)[0]).square().sum().backward()
            yield "buffers", buffers
            torch._foreach_mul_(buffers, 1e-3)
            optimizer.step()
            torch._foreach_zero_(buffers)
            yield from everything(model, optimizer)

    same(script, mode="backward")


class Weighted(torch.autograd.Function):
    """x * w; the gradient of w is a part of a buffer that is kept."""

    @staticmethod
    def forward(ctx, x, w, buffer):
        ctx.save_for_backward(x)
        ctx.buffer = buffer
        return x * w

    @staticmethod
    def backward(ctx, slope):
        (x,) = ctx.saved_tensors
        ctx.buffer[: x.numel()].copy_((slope * x).view(-1))
        return None, ctx.buffer[: x.numel()].view_as(x), None


@pytest.mark.parametrize("n", (30, 30_000), ids=("small", "large"))
def test_a_backward_that_keeps_the_memory_of_the_gradient_it_returns(n):
    def script(wrap):
        w = nn.Parameter(torch.ones(n))
        optimizer = wrap(adamw([w]))
        for i in range(STEPS):
            optimizer.zero_grad()
            buffer = torch.empty(n + i)
            Weighted.apply(torch.full((n,), 0.5 + i), w, buffer).sum().backward()
            buffer.mul_(-1)
            optimizer.step()
            yield "weights", w.detach()

    same(script, mode="backward")


@pytest.mark.parametrize("n", (30, 30_000), ids=("small", "large"))
def test_gradients_that_are_parts_of_one(n):
    """Those of cat() are views of one gradient, of which a hook keeps another view."""

    def script(wrap):
        params = [nn.Parameter(torch.full((n,), 1.0 + i)) for i in range(3)]
        optimizer = wrap(sgd(params))
        for i in range(STEPS):
            optimizer.zero_grad()
            kept = []
            flat = torch.cat(params)
            flat.register_hook(lambda g, kept=kept: kept.append(g.view(3, -1)))
            (flat * (i + 1)).square().sum().backward()
            kept[0].mul_(0.25)
            optimizer.step()
            yield "weights", [p.detach() for p in params]

    same(script, mode="backward")


def hidden_of(model, x):
    hidden, _ = model(x)
    return hidden


MODELS = {
    "linear": lambda: (net(), lambda model: loss_of(model, 0)),
    "convolution": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 3)),
        lambda model: model(torch.ones(2, 3, 6, 6)).square().sum(),
    ),
    "recurrent": lambda: (
        nn.LSTM(6, 8),
        lambda model: hidden_of(model, torch.ones(3, 2, 6)).square().sum(),
    ),
    "attention": lambda: (
        nn.TransformerEncoderLayer(8, 2, 16),
        lambda model: model(torch.ones(3, 2, 8)).pow(3).sum(),
    ),
    "used twice": lambda: (
        nn.Linear(6, 6),
        lambda model: model(model(torch.ones(2, 6)).tanh()).square().sum(),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_of_layers_are_their_own(name):
    """So that their updates run inside backward."""
    model, loss = MODELS[name]()
    optimizer = optfuse.fuse(adamw(model.parameters()), mode="backward")
    for i in range(STEPS):
        optimizer.zero_grad()
        loss(model).backward()
        created = optfuse.summary(optimizer).created
        assert created == (i + 1) * len(list(model.parameters()))
        optimizer.step()
