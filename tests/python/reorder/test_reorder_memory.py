# SPDX-License-Identifier: BSD-3-Clause
"""The peak memory that a schedule adds to a backward pass: the allocator counts the bytes that
Reordering.extra_bytes announced before the pass."""

from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import optfuse

LAYERS, WIDTH, ROWS = 32, 256, 256


class Sum(torch.autograd.Function):
    """A loss that keeps nothing; the gradient of its input has memory of its own."""

    @staticmethod
    def forward(ctx, y):
        return y.sum()

    @staticmethod
    def backward(ctx, g):
        return torch.ones(ROWS, WIDTH)


def chain():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def peak(model, set_to_none, reordering=None):
    """Bytes that tensors add at most in an iteration, and what was announced after its forward
    pass."""
    model.zero_grad(set_to_none)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = Sum.apply(model(torch.randn(ROWS, WIDTH)))
        announced = reordering.extra_bytes if reordering else 0
        loss.backward()
    events = profiler.profiler.kineto_results.events()
    sizes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return max(accumulate(size for _, size in sorted(sizes))), announced


CHOICES = {
    "last": {"schedule": "last"},
    "half of them": {"schedule": "reverse_first", "k": LAYERS // 2},
    "most of them": {"schedule": "reverse_first", "k": LAYERS - 4},
    "all of them": {"schedule": "reverse_first", "k": LAYERS},
    "2 MB": {"schedule": "budget", "memory": 2 << 20},
    "8 MB": {"schedule": "budget", "memory": 8 << 20},
    "some": {"schedule": [str(i) for i in range(5, 30, 3)]},
}


@pytest.mark.parametrize("set_to_none", (True, False))
@pytest.mark.parametrize("name", CHOICES)
def test_extra_bytes_are_what_the_allocator_counts(name, set_to_none):
    model = chain()
    peak(model, set_to_none)  # what libraries keep
    stock, _ = peak(model, set_to_none)
    with optfuse.reorder(model, **CHOICES[name]) as reordering:
        ours, announced = peak(model, set_to_none, reordering)
        held = reordering.held_bytes[1]
    assert ours - stock == announced, f"{ours:,} - {stock:,} = {ours - stock:,}, not {announced:,}"
    # The first half is free where gradients take no memory while backward goes on.
    is_free = name in ("half of them", "some") and not set_to_none
    assert announced == 0 < held if is_free else 0 < announced <= held
    if "memory" in CHOICES[name]:
        assert held <= CHOICES[name]["memory"]
