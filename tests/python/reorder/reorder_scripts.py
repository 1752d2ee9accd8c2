# SPDX-License-Identifier: BSD-3-Clause
"""Shared by the tests of reorder(): models in training with another order of backward."""

import torch
from common import Fused, Stock, assert_same, run
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import optfuse

CHOICES = {
    "stock": {"schedule": "stock"},
    "last": {"schedule": "last"},
    "reverse_first": {"schedule": "reverse_first", "k": 2},
    "budget": {"schedule": "budget", "memory": 1 << 14},
}
MODES = (None, "forward", "backward")


class Unfused(Stock):
    """The optimizer stays stock's; only backward has another order."""

    fused = True

    def prove(self):
        pass


def same_reordered(script, choice, mode=None):
    """Runs script(wrap, arrange) in stock's order and in another one; every yield agrees.
    arrange(model) has to be called once for each model, before it trains."""
    made, models = [], []

    def arrange(model):
        models.append(model)  # a Reordering ends with its model
        made.append(optfuse.reorder(model, **choice))

    stock = run(lambda wrap: script(wrap, lambda model: None), Stock())
    wrap = Fused(mode) if mode else Unfused()
    try:
        ours = run(lambda wrap: script(wrap, arrange), wrap)
        if choice["schedule"] != "stock":
            waiting = [row for r in made for row in r.plan.rows if row.turn is not None]
            assert waiting, "no dW waited: the test would prove nothing"
    finally:
        for reordering in made:
            reordering.remove()
    assert stock, "the script yielded nothing"
    for i, (a, b) in enumerate(zip(ours, stock, strict=True)):
        assert_same(f"yield {i}, {b[0]}", a, b)
    wrap.prove()


def mlp(width=8, layers=4):
    inner = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*inner, nn.Linear(width, 3))


def hooks_of_all():
    """Those before each optimizer's step(), but for those of masters(), which stay."""
    return [h for h in _global_optimizer_pre_hooks.values() if not hasattr(h, "concerns")]


def random(i, *shape):
    """On the default device; the one that the tests play has no random numbers."""
    generator = torch.Generator().manual_seed(i)
    return torch.randn(*shape, generator=generator, device="cpu").to(torch.get_default_device())


def x_of(i, n=5, width=8):
    return random(i, n, width)


def order_of_backward(model, x, loss=lambda y: y.square().mean()):
    """The tasks of a backward pass as a profiler sees them: "dX of 0", "dW of 0", ..."""
    y = loss(model(x))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y.backward()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    ours = (event.name.removeprefix("optfuse ") for event in events)
    return [name for name in ours if name.startswith(("dX of ", "dW of "))]
