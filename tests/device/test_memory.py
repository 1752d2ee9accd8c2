# SPDX-License-Identifier: BSD-3-Clause
"""Memory and waiting on a real GPU: backward mode frees the gradients, forward mode needs no
more than stock, and no step waits for the device."""

import contextlib
import gc

import gpu
import pytest
import torch
from common import Fused, Stock, adamw, batch, sgd
from gpu import NAME
from legal import in_order, net, train
from torch import nn

import optfuse

pytestmark = pytest.mark.skipif(not gpu.IS_REAL, reason="the GPU that the CPU plays never waits")
WIDTH, LAYERS, WARMUP, STEPS = 1024, 24, 2, 3
GRADIENTS = LAYERS * (WIDTH * WIDTH + WIDTH) * 4


def peak(wrap, clear):
    """Peak bytes of a few iterations; clear: zero_grad() right after step()."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to(NAME)
    optimizer = wrap(adamw(model.parameters()))
    x = torch.ones(8, WIDTH, device=NAME)
    for i in range(WARMUP + STEPS):
        if i == WARMUP:
            torch.cuda.reset_peak_memory_stats()
        if not clear:
            optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if clear:
            optimizer.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


#: Mode, whether gradients are cleared right after step(), and the bytes over stock's.
PEAKS = [("backward", False, -0.7 * GRADIENTS)]
PEAKS += [("forward", clear, 1 << 20) for clear in (False, True)]


@pytest.mark.parametrize(("mode", "clear", "most"), PEAKS)
def test_peak_memory(mode, clear, most):
    peak(Stock(), clear)  # what is allocated once is allocated before
    stock, ours = peak(Stock(), clear), peak(Fused(mode), clear)
    said = f"peak {ours / 1e6:.1f} MB, stock's {stock / 1e6:.1f} MB"
    print(f"{said}; the gradients are {GRADIENTS / 1e6:.1f} MB")
    assert ours <= stock + most, said


@contextlib.contextmanager
def no_waiting():
    """Whatever makes the host wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def rate_on_the_device(parameters):
    return adamw(parameters, lr=torch.tensor(1e-2, device=NAME), capturable=True)


WAYS = [(make, mode, False) for make in (adamw, sgd) for mode in ("forward", "backward")]
WAYS += [(adamw, "forward", True), (sgd, "forward", True), (rate_on_the_device, "forward", False)]


@pytest.mark.parametrize(("make", "mode", "clips"), WAYS)
def test_no_step_waits_for_the_device(make, mode, clips):
    model = net()
    optimizer = Fused(mode)(make(model.parameters()))
    lr = optimizer.param_groups[0]["lr"]

    def iterate(x, y):
        if isinstance(lr, torch.Tensor):
            lr.mul_(0.9)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        if clips:
            optfuse.clip_grad_norm_(optimizer, 0.05)
        optimizer.step()

    inputs = [[t.to(NAME) for t in batch(i)] for i in range(WARMUP + STEPS)]
    for x, y in inputs[:WARMUP]:
        iterate(x, y)
    with no_waiting():
        for x, y in inputs[WARMUP:]:
            iterate(x, y)


def test_waiting_would_be_noticed():
    with pytest.raises(RuntimeError), no_waiting():
        torch.ones(3, device=NAME).sum().item()


class Foreign:
    """A tensor as other libraries hand their memory over."""

    def __init__(self, t):
        self.__cuda_array_interface__ = t.__cuda_array_interface__


@in_order("forward", "backward")
def test_a_weight_read_through_the_array_interface(wrap):
    model = net()
    optimizer = wrap(adamw(model.parameters()))
    for i in range(4):
        train(model, optimizer, i)
        wrap.pending()
        for p in model.parameters():
            yield "weight", torch.as_tensor(Foreign(p.detach()), device=NAME).clone()
