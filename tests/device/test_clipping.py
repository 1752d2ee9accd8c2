# SPDX-License-Identifier: BSD-3-Clause
"""Clipping on a GPU that the CPU plays: norms, gradients and updates have the bits
of torch's function and step(). Others look at who looks, at streams, at loss
scaling and at what it costs."""

import pytest
import torch
from clipped import LIMIT, STEPS, clip, clipped_steps
from common import Fused, Stock, adamw, assert_same, sgd
from fakecuda import NAME
from legal import backward, legal, net, play, settle
from test_clipping_looks import LOOKS
from test_clipping_scaling import divided
from test_clipping_streams import stepped_on_another_stream


@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_the_bits_of_torchs_function_and_step(make, dtype):
    legal(clipped_steps(make, dtype))


@pytest.mark.parametrize("limit", [1e9, 0.0, float("inf"), float("nan")])
def test_every_limit(limit):
    legal(clipped_steps(limit=limit))


def test_gradients_of_several_dtypes():
    def script(wrap):
        dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float32)
        params = [torch.nn.Parameter(torch.ones(300, device=NAME, dtype=t)) for t in dtypes]
        optimizer = wrap(adamw(params))
        for i in range(STEPS):
            for p in params:
                p.grad = torch.linspace(-1, 1 + i, 300).to(NAME, p.dtype)
            yield "norm", clip(optimizer)
            optimizer.step()
        yield "gradients", [p.grad for p in params]
        yield "weights", params

    legal(script)


@pytest.mark.parametrize("norm_type", [1.0, float("inf")])
def test_other_norms(norm_type):
    legal(clipped_steps(norm_type=norm_type))


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("how", ["kept", "given"])
def test_memory_that_copies_on_write(how, foreach):
    """PyTorch's multi-tensor function clips a lazy clone, too, and its loop doesn't."""

    def script(wrap):
        params = [torch.nn.Parameter(torch.ones(300, device=NAME)) for _ in range(3)]
        optimizer = wrap(sgd(params))
        for i in range(STEPS):
            others = []
            params[2].grad = torch.ones(300, device=NAME)  # is updated later
            for p in params[:2]:
                g = torch.linspace(-1, 1 + i, 300).to(NAME)
                lazy = torch._lazy_clone(g)
                p.grad, other = (g, lazy) if how == "kept" else (lazy, g)
                others.append(other)
            yield "norm", clip(optimizer, foreach=foreach)
            yield "gradients", [p.grad.clone() for p in params[:2]]
            optimizer.step()
            yield "others", others
        yield "weights", params

    legal(script)


def test_step_clips_by_itself():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            backward(model, optimizer, i)
            if not wrap.fused:
                clip(optimizer)
            optimizer.step()
        yield "weights", list(model.parameters())

    legal(script, max_grad_norm=LIMIT)


@pytest.mark.parametrize("make", [torch.optim.RMSprop, torch.optim.Adafactor])
def test_optimizers_without_kernels_have_their_gradients_clipped(make):
    legal(clipped_steps(make))


# Guards


def kept(script, stock):
    """Whether ours gives these bits."""
    try:
        ours, found = play(script, Fused("forward"))
        for a, b in zip(ours, stock, strict=True):
            assert_same(b[0], a[1], b[1])
    except (AssertionError, RuntimeError):  # an address that stays sealed, too
        return False
    finally:
        settle()
    return not found


def check_guard(name, script, monkeypatch):
    stock, _ = play(script, Stock())
    assert kept(script, stock), f"{name!r} is on, and the promise is broken"
    monkeypatch.setenv("OPTFUSE_TEST_GUARDS_OFF", name)
    assert not kept(script, stock), f"{name!r} can be off without harm"
    monkeypatch.delenv("OPTFUSE_TEST_GUARDS_OFF")


def test_guards(monkeypatch):
    check_guard("factors", clipped_steps(), monkeypatch)
    check_guard("unread", LOOKS["after"], monkeypatch)
    check_guard("clipstream", stepped_on_another_stream, monkeypatch)
    check_guard("divided", divided, monkeypatch)
