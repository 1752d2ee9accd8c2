# SPDX-License-Identifier: BSD-3-Clause
"""Parameters, gradients and state in any memory layout, size and mix of dtypes.

Stock's fused kernels walk through memory and pay no heed to strides, so that
a gradient or a state whose strides differ from the parameter's gives wrong
numbers there. The reference is stock with the tensors in one layout: that of
the parameter, or contiguous where the parameter's memory has holes.
"""

import pytest
import torch
from common import adamw, assert_same_tensor, everything, same, sgd
from scripts import trained
from torch import nn
from torch.optim import Adam, AdamW

import optfuse

STEPS = 5
both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))
CHANNELS_LAST = torch.channels_last


def numbers(seed, *shape):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())


def last(t):
    return t.to(memory_format=CHANNELS_LAST)


def transposed(t):
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def with_holes(t):
    """The same values in every other column of a wider tensor."""
    wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), 9.0)
    wide[..., ::2] = t
    return wide[..., ::2]


def broadcast(t):
    return t[:1].expand(t.shape)


def overlapping(t):
    return torch.as_strided(t.flatten(), t.shape, [1] * t.dim())


def as_it_is(t):
    return t


LAYOUTS = {
    "channels_last": (last, as_it_is),
    "channels_last gradient": (as_it_is, last),
    "both channels_last": (last, last),
    "transposed": (transposed, as_it_is),
    "transposed gradient": (as_it_is, transposed),
    "gradient with holes": (as_it_is, with_holes),
    "broadcast gradient": (as_it_is, broadcast),
    "overlapping gradient": (as_it_is, overlapping),
    "with holes": (with_holes, as_it_is),
    "holes in both": (with_holes, with_holes),
    "holes and channels_last": (with_holes, last),
}


def reference_layout(lay):
    """Dense in the parameter's own order, or contiguous if it has holes."""
    return torch.Tensor.contiguous if lay is with_holes else lay


def deliver(optimizer, p, gradient, mode):
    if mode == "backward":
        optimizer.zero_grad()
        p.register_hook(lambda _: gradient)
        p.sum().backward()
        p._backward_hooks.clear()
    else:
        p.grad = gradient


@both_modes
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", (adamw, sgd))
def test_every_layout_gives_the_bits_of_the_dense_one(layout, make, mode):
    lay, lay_gradient = LAYOUTS[layout]
    shape = (3, 5, 4, 7)
    dense = reference_layout(lay)
    p = nn.Parameter(lay(numbers(1, *shape)))
    q = nn.Parameter(dense(numbers(1, *shape)).clone(memory_format=torch.preserve_format))
    ours, stock = optfuse.fuse(make([p]), mode=mode), make([q])
    strides = p.stride()
    for step in range(STEPS):
        gradient = lay_gradient(numbers(10 + step, *shape))
        deliver(ours, p, gradient, mode)
        q.grad = torch.empty_like(q).copy_(gradient)
        ours.step()
        stock.step()
        if step != 1:
            assert_same_tensor(f"{layout}, step {step + 1}", p, q)
    for key in ours.state[p]:
        assert_same_tensor(key, ours.state[p][key], stock.state[q][key])
    assert p.stride() == strides
    if lay is with_holes:
        others = p.detach().as_strided(shape, strides, 1)
        assert (others == 9).all(), "elements between those of the parameter were written"


@both_modes
@pytest.mark.parametrize("lay", (as_it_is, last, with_holes))
def test_state_in_another_layout(lay, mode):
    """As after loading a state_dict that was saved with another memory format."""
    shape = (3, 5, 4, 7)
    p, q = nn.Parameter(last(numbers(1, *shape))), nn.Parameter(last(numbers(1, *shape)))
    ours, stock = optfuse.fuse(adamw([p]), mode=mode), adamw([q])
    for step in range(STEPS):
        gradient = numbers(10 + step, *shape)
        deliver(ours, p, gradient.clone(), mode)
        q.grad = last(gradient)
        ours.step()
        stock.step()
        if step == 1:
            ours.state[p]["exp_avg"] = lay(ours.state[p]["exp_avg"].contiguous())
    assert_same_tensor("parameter", p, q)
    assert_same_tensor("exp_avg", ours.state[p]["exp_avg"], stock.state[q]["exp_avg"])


@both_modes
def test_a_convolution_in_channels_last(mode):
    def start(wrap):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        model = model.to(memory_format=CHANNELS_LAST)
        optimizer = wrap(adamw(model.parameters()))
        return model, optimizer

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        loss = model(last(numbers(i, 2, 3, 8, 8))).square().mean()
        loss.backward()
        optimizer.step()
        yield "loss", loss

    same(trained(start=start, iteration=iteration), mode)


@both_modes
@pytest.mark.parametrize("shape", ((), (0,), (3, 0), (1, 1, 1)))
def test_odd_sizes_between_ordinary_ones(shape, mode):
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        sum((p * i).square().sum() for p in model).backward()
        optimizer.step()

    same(
        trained(
            model=lambda: nn.ParameterList([numbers(1, 5), numbers(2, *shape), numbers(3, 4)]),
            iteration=iteration,
        ),
        mode,
    )


@both_modes
@pytest.mark.parametrize("kind", (Adam, AdamW))
def test_several_dtypes_in_one_optimizer(kind, mode):
    def script(wrap):
        dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32)
        model = nn.ParameterList([numbers(i, 33).to(d) for i, d in enumerate(dtypes)])
        optimizer = wrap(kind(model.parameters(), lr=0.01, fused=True))
        for i in range(STEPS):
            optimizer.zero_grad()
            sum((p * (i + 1)).square().sum().double() for p in model).backward()
            optimizer.step()
        yield from everything(model, optimizer)

    same(script, mode)


@both_modes
def test_float64_as_the_default_dtype(mode):
    def script(wrap):
        torch.set_default_dtype(torch.float64)
        try:
            model = nn.Linear(7, 5)
            optimizer = wrap(adamw(model.parameters()))
            for i in range(STEPS):
                optimizer.zero_grad()
                model(numbers(i, 3, 7).double()).square().sum().backward()
                optimizer.step()
            yield from everything(model, optimizer)
        finally:
            torch.set_default_dtype(torch.float32)

    same(script, mode)
