# SPDX-License-Identifier: BSD-3-Clause
"""optfuse.clip_grad_norm_: the norm, the gradients as anyone sees them and the
updates have the bits of torch's function followed by step()."""

import math

import on_device
import pytest
import torch
from clip_scripts import DTYPES, TIGHT, clip, gradients, script_of
from common import (
    adamw,
    assert_same_tensor,
    batch,
    everything,
    fused_backward,
    loss_of,
    net,
    refused,
    same,
    sgd,
)
from torch import nn

import optfuse
from optfuse._clipping import clip_norm


@pytest.mark.parametrize("make", (adamw, sgd))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("max_norm", (TIGHT, 1e9, 0.0, math.inf, math.nan))
def test_clip_and_step(make, dtype, max_norm):
    if make is sgd and dtype in (torch.bfloat16, torch.float16) and not on_device.DEVICE:
        pytest.skip("stock's fused SGD is broken in 16 bits on CPUs")
    same(script_of(make, dtype, max_norm=max_norm))


@pytest.mark.parametrize("norm_type", (1, 2.0, 3, 0, 0.5, math.inf, -math.inf, "inf"))
@pytest.mark.parametrize("foreach", (None, True, False))
def test_norm_types_and_foreach(norm_type, foreach):
    same(script_of(norm_type=norm_type, foreach=foreach))


@pytest.mark.parametrize("options", ({"amsgrad": True}, {"maximize": True}))
def test_options_of_the_rule(options):
    same(script_of(lambda p: adamw(p, **options)))


def test_with_threads(several_threads):
    def build(dtype):
        return nn.Linear(33, 3000).to(dtype)

    def script(wrap):
        model = build(torch.float32)
        optimizer = wrap(adamw(model.parameters()))
        for i in range(2):
            optimizer.zero_grad()
            model(batch(i, inputs=33)[0]).square().mean().backward()
            yield "norm", clip(wrap, model.parameters())
            optimizer.step()
            yield "gradients", gradients(model)
            yield from everything(model, optimizer)

    same(script)


def test_our_norms_are_those_of_torch(several_threads):
    """At every length of a tail, of several gradients at once, on one thread
    and on three, with infinities and NaN among them."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("PyTorch's norm has other roundings here; its operator is used")
    assert torch.ops.optfuse.norms_are_torchs()
    sizes = (*range(1, 130), 1000, 4095, 33_333, 400_001)
    for spread in (1.0, 1e-30, 1e25):
        params = [nn.Parameter(torch.zeros(n)) for n in sizes]
        optimizer = optfuse.fuse(sgd(params))
        for p in params:
            p.grad = torch.randn(p.shape) * spread
        params[50].grad[3], params[60].grad[4] = math.inf, math.nan
        for threads in (1, 3):
            torch.set_num_threads(threads)
            ours = clip_norm.Gradients(params).norms()
            stock = torch.stack([torch.linalg.vector_norm(p.grad, 2.0) for p in params])
            assert_same_tensor(f"norms of {spread}", ours, stock)
            stock = torch.stack(torch._foreach_norm([p.grad for p in params], 2.0))
            assert_same_tensor(f"foreach norms of {spread}", ours, stock)
        optfuse.unfuse(optimizer)


# Errors


@pytest.mark.parametrize("value", (math.inf, math.nan))
def test_nonfinite_norms_raise_if_asked(value):
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(2):
            optimizer.zero_grad()
            loss_of(model, i).backward()
            model[0].bias.grad[0] = value
            try:
                clip(wrap, model.parameters(), error_if_nonfinite=True)
            except RuntimeError as error:
                yield "error", str(error)
            yield "gradients", gradients(model)
            optimizer.step()
            yield from everything(model, optimizer)

    same(script)


def test_backward_mode_is_refused():
    model, optimizer = fused_backward()
    with optfuse.accumulate(optimizer):
        loss_of(model, 0).backward()
    before = gradients(model)
    refused(lambda: optfuse.clip_grad_norm_(optimizer, TIGHT), "parameter 0 of group 0")
    refused(lambda: optfuse.clip_grad_norm_(model.parameters(), TIGHT), "backward mode")
    for was, now in zip(before, gradients(model), strict=True):
        assert_same_tensor("gradient", now, was)


# max_grad_norm
