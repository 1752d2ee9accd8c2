# SPDX-License-Identifier: BSD-3-Clause
"""optfuse.clip_grad_norm_ over some parameters, over those of others, and over odd
gradients."""

import math

import pytest
import torch
from clip_scripts import DTYPES, STEPS, TIGHT, backward, clip, gradients, long_net, twin_of
from common import adamw, assert_same_tensor, everything, loss_of, net, same, sgd
from torch import nn

import optfuse


def test_a_subset_and_parameters_that_are_not_fused():
    def script(wrap):
        model = long_net()
        optimizer = wrap(adamw(model[:1].parameters()))
        plain = sgd(model[2:].parameters())
        for i in range(STEPS):
            model.zero_grad()
            backward(model, i)
            yield "norm", clip(wrap, [model[0].bias, *model[2:].parameters()])
            yield "gradients of some", gradients(model[2:])
            optimizer.step()
            plain.step()
            yield from everything(model, optimizer)

    same(script)


def test_only_parameters_that_are_not_fused():
    model = net()
    loss_of(model, 0).backward()
    twin = twin_of(model)
    ours = optfuse.clip_grad_norm_(model.parameters(), TIGHT)
    assert_same_tensor("norm", ours, nn.utils.clip_grad_norm_(twin.parameters(), TIGHT))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same_tensor("gradient", p.grad, q.grad)
    assert optfuse.clip_grad_norm_([], 1.0) == 0


def test_two_optimizers_on_one_parameter():
    def script(wrap):
        model = long_net()
        optimizers = [wrap(adamw(model.parameters())), wrap(sgd(model.parameters()))]
        for i in range(STEPS):
            model.zero_grad()
            backward(model, i)
            yield "norm", clip(wrap, model.parameters())
            for optimizer in optimizers:
                optimizer.step()
            yield from everything(model, optimizers[0])

    same(script)


def test_mixed_dtypes():
    def script(wrap):
        params = [nn.Parameter(torch.linspace(-1, 1, 40).to(dtype)) for dtype in DTYPES]
        optimizer = wrap(adamw(params))
        for i in range(STEPS):
            for p in params:
                p.grad = (p.detach() * (3 + i)).clone()
            yield "norm", clip(wrap, params)
            optimizer.step()
            yield "params", params
            yield "gradients", [p.grad for p in params]

    same(script)


def test_a_gradient_without_dimensions_beside_a_wider_one():
    """The norm is float64, and so is the product of two tensors without dimensions."""

    def script(wrap):
        params = [nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(9).double())]
        optimizer = wrap(adamw(params))
        for i in range(20):
            params[0].grad = torch.tensor(1 / (3 + i))
            params[1].grad = torch.linspace(-1, 1 + i, 9).double()
            yield "norm", clip(wrap, params)
            yield "gradients", [p.grad for p in params]
            optimizer.step()
        yield "params", params

    same(script)


def odd_gradients():
    base = torch.linspace(-2, 3, 12 * 11).view(12, 11)
    yield "transposed", base.t().contiguous().t()
    yield "with holes", torch.linspace(0, 1, 24 * 11).view(24, 11)[::2]
    yield "a part of another", torch.linspace(0, 1, 24 * 11).view(24, 11)[3:15]
    yield "negated", torch._neg_view(base.clone())
    yield "from numpy", torch.from_numpy(base.cpu().numpy().copy()).to(base.device)
    yield "empty", torch.empty(0)
    yield "with infinity", base.masked_fill(base > 2.9, math.inf)
    yield "with NaN", base.masked_fill(base > 2.9, math.nan)
    yield "zero", torch.zeros(12, 11)
    yield "denormal", base * 1e-40
    yield "huge", base * 1e30


@pytest.mark.parametrize("name", [name for name, _ in odd_gradients()])
def test_odd_gradients(name):
    def script(wrap):
        grad = dict(odd_gradients())[name]
        params = [nn.Parameter(torch.ones(grad.shape)), nn.Parameter(torch.ones(3))]
        optimizer = wrap(adamw(params))
        for _ in range(2):
            params[0].grad = dict(odd_gradients())[name]
            params[1].grad = torch.arange(3.0)
            # Stock's foreach functions don't take lazily negated tensors, and its
            # fused kernel reads memory in order, whatever the strides.
            yield "norm", clip(wrap, params, foreach=False)
            if not wrap.fused:
                params[0].grad = params[0].grad.contiguous().resolve_neg()
            optimizer.step()
            yield "params", params
            yield "gradients", [p.grad for p in params]

    same(script)


@pytest.mark.parametrize("max_norm", (1e-3, 1e4), ids=("changed", "left as it is"))
@pytest.mark.parametrize("norm_type", (1.0, 2.0, math.inf))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_that_can_not_be_multiplied(dtype, norm_type, max_norm):
    """Stock multiplies by 1, too."""

    def script(wrap):
        params = [nn.Parameter(torch.ones(3, 4, dtype=dtype)) for _ in range(2)]
        optimizer = wrap(adamw(params))
        params[0].grad = torch.ones(3, 4, dtype=dtype)
        params[1].grad = torch.tensor(0.5, dtype=dtype).expand(3, 4)
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            clip(wrap, params, max_norm, norm_type)
        params[1].grad = params[1].grad.clone()
        optimizer.step()
        yield "params", params

    same(script)


def test_gradients_that_share_memory():
    """Views of one buffer, as in data-parallel training; and one tensor twice."""

    def script(wrap):
        params = [nn.Parameter(torch.ones(40)) for _ in range(4)]
        optimizer = wrap(adamw(params))
        for i in range(STEPS):
            buffer = torch.linspace(-1, 1 + i, 80)
            params[0].grad, params[1].grad = buffer[:40], buffer[40:]
            params[2].grad = params[3].grad = torch.linspace(0, 1, 40)
            yield "norm", clip(wrap, params)
            optimizer.step()
            yield "params", params
            yield "gradients", [p.grad for p in params]
            yield "buffer", buffer

    same(script, prove=False)


def test_parameters_with_shared_memory():
    def script(wrap):
        flat = torch.linspace(-1, 1, 80)
        params = [nn.Parameter(flat[:40]), nn.Parameter(flat[40:]), nn.Parameter(torch.ones(9))]
        optimizer = wrap(adamw(params))
        for i in range(STEPS):
            for p in params:
                p.grad = torch.full(p.shape, 1.0 + i)
            yield "norm", clip(wrap, params)
            optimizer.step()
            yield "params", params
            yield "gradients", [p.grad for p in params]

    same(script)


def test_a_gradient_of_a_create_graph_backward():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        with torch.warnings.catch_warnings():
            torch.warnings.simplefilter("ignore")
            loss_of(model, 0).backward(create_graph=True)
        yield "norm", clip(wrap, model.parameters())
        yield "gradients", gradients(model)
        optimizer.step()
        yield from everything(model, optimizer)

    same(script)
