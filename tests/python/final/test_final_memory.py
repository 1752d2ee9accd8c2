# SPDX-License-Identifier: BSD-3-Clause
"""The most bytes of tensors alive at once, by PyTorch's allocator."""

import gc

import pytest
import torch
from torch import nn

import optfuse

LAYERS, SIZE, ROWS = 24, 128, 16
pytestmark = pytest.mark.usefixtures("benchmarks")


def build(dtype):
    torch.manual_seed(0)
    layers = (
        layer for _ in range(LAYERS) for layer in (nn.Linear(SIZE, SIZE, dtype=dtype), nn.Tanh())
    )
    return nn.Sequential(*layers)


def peak_of(wrap, make, dtype=torch.bfloat16):
    from memory import peak_on_cpu

    def training(wrap):
        model = build(dtype)
        kept = wrap(make(model.parameters()))
        x = torch.ones(ROWS, SIZE, dtype=dtype)

        def iteration(kept=kept):
            model(x).float().square().mean().backward()

        return iteration

    gc.collect()  # what was there before does not die meanwhile
    return peak_on_cpu(training, wrap) * 1e6


def adamw(params):
    return torch.optim.AdamW(params, fused=True)


def adafactor(params):
    return torch.optim.Adafactor(params, foreach=False)


def hooks(optimizer):
    from variants import PythonHooks

    flag = {"fused": True} if isinstance(optimizer, torch.optim.AdamW) else {"foreach": False}
    return PythonHooks(optimizer, **flag)


def final(optimizer):
    return optfuse.fuse(optimizer, optfuse.Backward(final=True))


def test_no_gradients_are_kept():
    weight = SIZE * SIZE * 2
    of_model = LAYERS * (SIZE * SIZE + SIZE) * 2
    activations = LAYERS * 2 * ROWS * SIZE * 2
    limit = 3 * of_model + activations + 2 * weight + 50_000  # weights, both moments; small ones
    assert peak_of(final, adamw) <= limit


@pytest.mark.parametrize("make", [adamw, adafactor])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hooks_in_python_need_no_less(make, dtype):
    waiting = 512 << 10  # gradients of small parameters, for each other
    assert peak_of(final, make, dtype) <= peak_of(hooks, make, dtype) + waiting
