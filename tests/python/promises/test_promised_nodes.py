# SPDX-License-Identifier: BSD-3-Clause
"""Behind a layer whose gradient is promised stand stock's own nodes, so that hooks, saved tensors,
checkpoints and second derivatives are stock's."""

import contextlib

import pytest
import torch
from common import adamw, everything
from torch import nn
from torch.utils.checkpoint import checkpoint

import optfuse
from promises.deeds import HOOKS, PASSES, REFUSED, Place, Residual, do
from promises.scripted import MODES, STEPS, WIDTH, equal

SHAPES = ((5, WIDTH), (2, 3, WIDTH), (WIDTH,))
#: Where gradients must be promised; elsewhere somebody looks, or may.
PROMISED = {
    "plain",
    *("learned input, written", "learned input, written by .data", "two uses"),
    *("prehook of the node reads", "prehook of the node writes", "saved tensors with noise"),
    *("legacy hook of a layer reads", "hook of AccumulateGrad reads"),
}


def numbers(i, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(i))


def script_of(hooks, compute, bias, shape):
    def script(wrap):
        torch.manual_seed(0)
        model = Residual(WIDTH, bias)
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            place = Place(model, numbers(i, shape), i, wrap)
            optimizer.zero_grad()
            do(place, hooks, compute)
            yield "seen", place.seen
            optimizer.step()
        yield from everything(model, optimizer)

    return script


CASES = [*(((), name) for name in PASSES), *(((name,), "plain") for name in HOOKS)]


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("hooks", "compute"), CASES)
def test_deeds(hooks, compute, mode, bias):
    promised = True if {*hooks, compute} <= PROMISED else None
    is_refused = mode == "backward" and compute in REFUSED
    for shape in SHAPES if not hooks and compute == "plain" else SHAPES[:2]:
        with pytest.raises(optfuse.Error) if is_refused else contextlib.nullcontext():
            equal(script_of(hooks, compute, bias, shape), mode, promised=promised)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("when", ("fuse", "unfuse"))
@pytest.mark.parametrize("mode", MODES)
def test_fused_between_forward_and_backward(mode, when, bias):
    """Rows, inputs and outputs are as many, so that nothing but the order tells them apart."""

    def trained(changes):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias), nn.Tanh(), nn.Linear(8, 8, bias))
        optimizer = adamw(model.parameters())
        if changes and when == "unfuse":
            optimizer = optfuse.fuse(optimizer, mode)
        x = numbers(0, (8, 8)).requires_grad_()
        loss = checkpoint(model, x, use_reentrant=False).square().mean()
        if changes and when == "fuse":
            optimizer = optfuse.fuse(optimizer, mode)
        elif changes:
            optfuse.unfuse(optimizer)
        loss.backward()
        optimizer.step()
        return [x.grad, *(p.detach().clone() for p in model.parameters())]

    for a, b in zip(trained(True), trained(False), strict=True):
        assert torch.equal(a, b)


def test_compiled_autograd_computes_the_gradient():
    def script(wrap):
        torch.manual_seed(0)
        model = Residual(WIDTH, True)
        optimizer = wrap(adamw(model.parameters()))
        for i in range(2):
            optimizer.zero_grad()
            loss = model(numbers(i, SHAPES[0])).square().mean()
            with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
                loss.backward()
            optimizer.step()
        yield from everything(model, optimizer)

    equal(script, "forward", promised=False)
