# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: optfuse.clip_grad_norm_(), which for stock optimizers is torch's."""

import optfuse
from programs.deed import BATCH, BOOL, EITHER, INDEX, deed

OVER = {
    "optimizer": lambda world, i: world.optimizer(i),
    "parameters": lambda world, i: world.params(),
    "parameters of a model": lambda world, i: world.model(i).parameters(),
    "one parameter": lambda world, i: world.param(i),
    "one of them twice": lambda world, i: [*world.params(), world.param(i)],
}
ORDERS = (2.0, 2.0, 2.0, 1.0, float("inf"))
NORMS = (0.05, 0.05, 0.0, 1e4)  # the last one leaves gradients as they are


@deed(
    "anywhere",
    weight=4,
    over=OVER,
    index=INDEX,
    max_norm=NORMS,
    order=ORDERS,
    foreach=(None, None, False),
    strict=(False, False, True),
    backward=EITHER,
)
def clip_by_optfuse(world, over, index, max_norm, order, foreach, strict):
    norm = optfuse.clip_grad_norm_(over(world, index), max_norm, order, strict, foreach)
    world.see("norm", norm)


@deed(
    weight=5,
    model=INDEX,
    batch=BATCH,
    over=OVER,
    times=(1, 1, 2),
    max_norm=NORMS,
    order=ORDERS,
    look=(False, False, True),
    set_to_none=BOOL,
    backward=EITHER,
)
def clipped_by_optfuse(world, model, batch, over, times, max_norm, order, look, set_to_none):
    for optimizer in world.optimizers:
        optimizer.zero_grad(set_to_none)
    world.backward(world.loss(model, batch))
    for _ in range(times):
        clip_by_optfuse(world, over, model, max_norm, order, None, False)
        max_norm *= 0.5
    if look:
        world.see("gradients", [p.grad for p in world.params()])
    for i in range(len(world.optimizers)):
        world.step(i)


@deed(weight=2, model=INDEX, batch=BATCH, over=OVER, backward=EITHER)
def clipped_before_more_is_added(world, model, batch, over):
    """Gradients that a later pass adds are not clipped."""
    world.backward(world.loss(model, batch))
    clip_by_optfuse(world, over, model, 0.05, 2.0, None, False)
    world.backward(world.loss(model, batch + 1))
    for i in range(len(world.optimizers)):
        world.step(i)
