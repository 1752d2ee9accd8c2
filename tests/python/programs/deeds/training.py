# SPDX-License-Identifier: BSD-3-Clause
"""Deeds: ways to train."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import optfuse
from programs.deed import BATCH, BOOL, EITHER, EQUAL, INDEX, STEP, consumed, deed, raises
from programs.models import DRAWN, OF_SHAPES, SIXTEEN_BITS
from programs.optimizers import EVERY, REGISTERED, WITHOUT_KERNELS, has_closure


@deed(weight=30, every=EVERY, model=INDEX, batch=BATCH, set_to_none=(True, True, False))
def iteration(world, model, batch, set_to_none):
    world.train(lambda: world.loss(model, batch), set_to_none)


OF_ANY_KIND = tuple(name for name in DRAWN if name not in SIXTEEN_BITS)


@deed(weight=0, models=OF_ANY_KIND, kinds=("AdamW", "SGD", "RMSprop", "Elementwise"))
def iteration_of_a_model(world):
    """Parameters in unusual places."""
    world.train()


@deed(
    weight=0,
    models=("marked", *OF_SHAPES),
    kinds=tuple(WITHOUT_KERNELS),
    setup={"groups": 2},
    every=True,
    stock=EITHER,  # NumPy has no bfloat16
    backward=EITHER,
)
def iteration_by_a_class(world):
    """In each dtype."""
    world.train()
    world.look(gradients=False)


@deed(weight=4, batch=BATCH, set_to_none=BOOL)
def iteration_with_zero_grad_of_the_model(world, batch, set_to_none):
    for model in world.models:
        model.zero_grad(set_to_none)
    for p in world.extra:
        p.grad = None
    world.backward(world.loss(0, batch))
    for i in range(len(world.optimizers)):
        world.step(i)


@deed(weight=4, batch=BATCH)
def iteration_over_all_models(world, batch):
    world.train(lambda: sum(world.loss(m, batch) for m in range(len(world.models))))


# ---- its parts, in any order


@deed("anywhere", weight=12, model=INDEX, batch=BATCH, backward=EITHER)
def backward(world, model, batch):
    loss = world.loss(model, batch)
    world.backward(loss)
    world.see("loss", loss)


@deed("anywhere", weight=12, optimizer=INDEX, backward=EITHER, fault=("rearm", "seal"))
def step(world, optimizer):
    world.step(optimizer)


@deed(backward=consumed("backward() without zero_grad() after step()"))
def iteration_without_zero_grad(world):
    world.backward(world.loss(0, world.i))
    world.step(0)


@deed(setup={"accumulate": 2})
def iteration_of_two_passes(world):
    world.train()


TWO = [{"kind": "AdamW", "options": {"lr": 0.1}}, {"kind": "SGD", "options": {"lr": 0.1}}]


@deed(setup={"optimizers": TWO}, backward=raises("already"))
def iteration_of_two_optimizers(world):
    """Both have all parameters."""
    world.train()


@deed("anywhere", weight=6, optimizer=INDEX, set_to_none=BOOL)
def zero_grad(world, optimizer, set_to_none):
    world.optimizer(optimizer).zero_grad(set_to_none)


@deed("anywhere", weight=3, model=INDEX, set_to_none=BOOL)
def zero_grad_of_the_model(world, model, set_to_none):
    world.model(model).zero_grad(set_to_none)


@deed(optimizer=INDEX, model=INDEX, batch=BATCH, backward=EITHER)
def step_twice(world, optimizer, model, batch):
    world.backward(world.loss(model, batch))
    world.step(optimizer)
    world.step(optimizer)


@deed(weight=3, model=INDEX, batch=BATCH, times=(2, 3), backward=EITHER)
def accumulate(world, model, batch, times):
    for optimizer in world.optimizers:
        optimizer.zero_grad()
    for k in range(times):
        world.backward(world.loss(model, batch + k) / times)
    for i in range(len(world.optimizers)):
        world.step(i)


@deed(model=INDEX, batch=BATCH, again=BOOL, backward=EITHER, stock=EITHER)
def discarded_backward(world, model, batch, again):
    """Its gradients are thrown away."""
    world.backward(world.loss(model, batch))
    for chosen in world.models:
        chosen.zero_grad()
    if again:
        world.backward(world.loss(model, batch + 1))
    for i in range(len(world.optimizers)):
        world.step(i)


@deed(optimizer=INDEX, model=INDEX, batch=BATCH, kinds=has_closure, every=EVERY)
def step_with_closure(world, optimizer, model, batch):
    chosen = world.optimizer(optimizer)

    def closure():
        chosen.zero_grad()
        loss = world.loss(model, batch)
        world.backward(loss)
        return loss

    world.see("loss", world.step(optimizer, closure))
    # The others' parameters have gradients too.
    for i in range(len(world.optimizers)):
        if i in world.unsettled:
            world.step(i)


def without_arguments(kind):
    """A recorded class is called before it is given any."""
    return EQUAL if kind.way == REGISTERED else raises("got arguments")


@deed(STEP, weight=0, kinds=("RegisteredStateless", "GroupCounter"), backward=without_arguments)
def step_with_a_closure_that_it_ignores(world):
    def closure():
        raise AssertionError("stock does not call it")

    world.see("loss", world.step(0, closure))


# ---- other ways to reach a gradient


@deed(model=INDEX, batch=BATCH, use_reentrant=BOOL)
def checkpointed(world, model, batch, use_reentrant):
    def call(x):
        if x.is_floating_point():
            x = x.requires_grad_()
        return checkpoint(world.model(model), x, use_reentrant=use_reentrant)

    if use_reentrant and not world.kinds[model % len(world.kinds)].startswith("mlp"):
        return  # without an input that needs a gradient there is none
    world.train(lambda: world.loss(model, batch, call))


@deed(model=INDEX, batch=BATCH)
def functional_call(world, model, batch):
    def call(x):
        chosen = world.model(model)
        return torch.func.functional_call(chosen, dict(chosen.named_parameters()), (x,))

    world.train(lambda: world.loss(model, batch, call))


@deed(optimizer=INDEX, model=INDEX, batch=BATCH, backward=EITHER)
def gradients_by_func_grad(world, optimizer, model, batch):
    chosen = world.model(model)
    weights = {k: v.detach() for k, v in chosen.named_parameters()}

    def loss(weights):
        def call(x):
            return torch.func.functional_call(chosen, weights, (x,))

        return world.loss(model, batch, call)

    slopes = torch.func.grad(loss)(weights)
    for name, p in chosen.named_parameters():
        if p.requires_grad:
            p.grad = slopes[name].detach()
    del weights, slopes
    world.step(optimizer)


@deed(model=INDEX, batch=BATCH)
def under_autocast(world, model, batch):
    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return world.loss(model, batch).float()

    world.train(loss)


@deed(model=INDEX, batch=BATCH)
def penalty_on_the_input(world, model, batch):
    """Double backward, but the gradients of the weights come from one pass."""
    inputs = []

    def call(x):
        inputs.append(x.requires_grad_() if x.is_floating_point() else x)
        return world.model(model)(x)

    def loss():
        out = world.loss(model, batch, call)
        if not inputs[0].is_floating_point():
            return out
        (slope,) = torch.autograd.grad(out, inputs, create_graph=True)
        return out + slope.square().sum()

    world.train(loss)


@deed(model=INDEX, batch=BATCH)
def penalty_on_the_weights(world, model, batch):
    def loss():
        out = world.loss(model, batch)
        used = [p for p in world.model(model).parameters() if p.requires_grad]
        slopes = torch.autograd.grad(out, used, create_graph=True, allow_unused=True)
        return out + sum(s.square().sum() for s in slopes if s is not None)

    world.train(loss)


@deed(model=INDEX, batch=BATCH, backward=EITHER)
def backward_with_create_graph(world, model, batch):
    for optimizer in world.optimizers:
        optimizer.zero_grad()
    world.backward(world.loss(model, batch), create_graph=True)
    slopes = [p.grad for p in world.model(model).parameters() if p.grad is not None]
    slopes = [s for s in slopes if s.requires_grad]
    for p in world.params():
        p.grad = None  # ends the cycle of gradient and parameter
    if slopes:
        world.backward(sum(s.square().sum() for s in slopes))
    for i in range(len(world.optimizers)):
        world.step(i)


@deed(weight=3, batch=BATCH, retain=BOOL, backward=EITHER, stock=EITHER)
def adversarial(world, batch, retain):
    """Two losses and all optimizers over one graph, or over one each."""
    for optimizer in world.optimizers:
        optimizer.zero_grad()
    first = world.loss(0, batch)
    second = -0.5 * (first if retain else world.loss(-1, batch + 1))
    world.backward(first, retain_graph=retain)
    if not retain:
        world.step(0)
    world.backward(second)
    for i in range(len(world.optimizers)):
        world.step(i)


@deed(weight=3, model=INDEX, batch=BATCH)
def keep_a_loss(world, model, batch):
    """A graph that lives across steps."""
    world.losses.append(world.loss(model, batch))


@deed("anywhere", weight=3, backward=EITHER)
def backward_of_a_kept_loss(world):
    if world.losses:
        world.backward(world.losses.pop())


@deed(model=INDEX, batch=BATCH, factor=(0.5, -2.0))
def hook_changes_the_gradient(world, model, batch, factor):
    handles = [
        p.register_hook(lambda g: g * factor)
        for p in world.model(model).parameters()
        if p.requires_grad
    ]
    world.train(lambda: world.loss(model, batch))
    for handle in handles:
        handle.remove()


def read_gradient(p):
    p.grad.sum()


@deed(index=INDEX)
def hook_after_accumulation(world, index):
    """Reads the gradient where it is complete, in every backward from now on."""
    p = world.param(index)
    if p.is_leaf and p.requires_grad:
        world.handles.append(p.register_post_accumulate_grad_hook(read_gradient))


@deed()
def remove_hooks(world):
    while world.handles:
        world.handles.pop().remove()


# ---- between backward and step


@deed(
    weight=4,
    model=INDEX,
    batch=BATCH,
    kind=("norm", "value", "inf norm"),
    foreach=BOOL,
    backward=EITHER,
    fault=("consumed", "discarded"),
)
def clipped(world, model, batch, kind, foreach):
    for optimizer in world.optimizers:
        optimizer.zero_grad()
    world.backward(world.loss(model, batch))
    clip(world, kind, foreach)
    for i in range(len(world.optimizers)):
        world.step(i)


@deed(
    "anywhere",
    weight=3,
    kind=("norm", "value", "inf norm"),
    foreach=BOOL,
    backward=EITHER,
    fault=("consumed", "discarded"),
)
def clip(world, kind, foreach):
    if kind == "value":
        nn.utils.clip_grad_value_(world.params(), 0.01, foreach=foreach)
        return
    order = 2.0 if kind == "norm" else float("inf")
    norm = nn.utils.clip_grad_norm_(world.params(), 0.05, order, foreach=foreach)
    world.see("norm", norm)


OVERFLOW = (False, False, True)
CLIPPING = {
    "": None,
    "torch": lambda world, optimizer: nn.utils.clip_grad_norm_(world.params(), 0.05),
    "optfuse": lambda world, optimizer: optfuse.clip_grad_norm_(world.params(), 0.05),
    "the optimizer": lambda world, optimizer: optfuse.clip_grad_norm_(optimizer, 0.05),
}


@deed(
    weight=4,
    model=INDEX,
    batch=BATCH,
    unscale=BOOL,
    clipping=CLIPPING,
    overflow=OVERFLOW,
    backward=EITHER,
)
def scaled(world, model, batch, unscale, clipping, overflow):
    if world.scaler is None:
        world.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
    for optimizer in world.optimizers:
        optimizer.zero_grad()
    loss = world.loss(model, batch).float() * (float("inf") if overflow else 1)
    world.backward(world.scaler.scale(loss))
    for i, optimizer in enumerate(world.optimizers):
        if unscale:
            world.scaler.unscale_(optimizer)
            if clipping:
                world.see("norm", clipping(world, optimizer))
        world.scaler.step(optimizer)
        world.stepped(i)
    world.scaler.update()
    world.see("scale", world.scaler.get_scale())
