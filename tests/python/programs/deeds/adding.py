# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: passes marked by optfuse.accumulate(), which for stock optimizers and
in forward mode does nothing."""

import optfuse
from programs.deed import BATCH, BOOL, EITHER, INDEX, deed
from programs.deeds.failing import FailsInBackward


@deed(
    weight=6,
    model=INDEX,
    batch=BATCH,
    times=(2, 3),
    same_model=BOOL,
    set_to_none=BOOL,
    look=(False, False, True),
)
def accumulate_with_marks(world, model, batch, times, same_model, set_to_none, look):
    """With two models some parameters get no gradient in some of the passes."""
    for optimizer in world.optimizers:
        optimizer.zero_grad(set_to_none)
    with optfuse.accumulate(*world.optimizers):
        for k in range(1, times):
            chosen = model if same_model else model + k
            world.backward_that_adds(world.loss(chosen, batch + k) / times)
            if look:
                world.look()
    world.backward(world.loss(model, batch) / times)
    for i in range(len(world.optimizers)):
        world.step(i)


@deed("anywhere", weight=4, model=INDEX, batch=BATCH, backward=EITHER)
def backward_that_only_adds(world, model, batch):
    """The next action is up to the program: step(), another pass, or a look."""
    with optfuse.accumulate(*world.optimizers):
        world.backward_that_adds(world.loss(model, batch))


@deed("anywhere", optimizer=INDEX, model=INDEX, batch=BATCH, backward=EITHER)
def backward_that_adds_for_one(world, optimizer, model, batch):
    """For the other optimizers it is a pass that updates."""
    with optfuse.accumulate(world.optimizer(optimizer)):
        world.backward(world.loss(model, batch))


@deed(weight=1, model=INDEX, batch=BATCH, backward=EITHER, stock=EITHER)
def exception_in_a_pass_that_adds(world, model, batch):
    """Before any gradient; the context is left by it."""
    with optfuse.accumulate(*world.optimizers), optfuse.accumulate(world.optimizer(0)):
        world.backward_that_adds(FailsInBackward.apply(world.loss(model, batch)))
