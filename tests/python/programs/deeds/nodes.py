# SPDX-License-Identifier: BSD-3-Clause
"""Deeds at the nodes of a layer: hooks of every kind, passes that walk nodes or compute them again,
and layers that are given tensors whose numbers are absent or late."""

import contextlib
import warnings

import torch
from common import adamw
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from programs.deed import EITHER, deed
from programs.models import MODELS, inputs, numbers, rows


class Residual(nn.Module):
    """Layers beside a residual stream, all three of one shape."""

    def __init__(self, bias):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4, bias) for _ in range(3))

    def forward(self, x):
        h = self.first(x)
        return self.third(h + self.second(torch.tanh(h)))


RESIDUALS = ("residual", "residual without bias")
MODELS[RESIDUALS[0]] = lambda: Residual(True), rows
MODELS[RESIDUALS[1]] = lambda: Residual(False), lambda i: numbers(i, 2, 3, 4)


def layer(world):
    """With a residual stream beside it."""
    return world.modules()[1]


def node_of(y):
    """The node that multiplies."""
    node = y.grad_fn
    while not node.name().startswith(("Addmm", "Mm")):
        node = node.next_functions[0][0]
    return node


# Hooks. Each function is given what to call with gradients, and returns a handle.


def legacy(on):
    def add(world, hook):
        if on == "every module":
            return nn.modules.module.register_module_backward_hook(
                lambda module, got, of: hook(got) if isinstance(module, nn.Linear) else None
            )
        module = layer(world) if on == "a layer" else world.model()
        return module.register_backward_hook(lambda module, got, of: hook(got))

    return add


def on_output(register):
    """register(hook, y): adds it behind the output of the layer."""

    def add(world, hook):
        def behind(module, given, y):
            if y.grad_fn is not None:
                register(hook, y)

        return layer(world).register_forward_hook(behind)

    return add


def of_one(hook):
    """For a tensor's hook."""

    def called(g):
        changed = hook((g,))
        return None if changed is None else changed[0]

    return called


def at_the_end(world, hook):
    weight = layer(world).weight
    end = weight.view_as(weight).grad_fn.next_functions[0][0]
    return end.register_hook(lambda got, of: hook([weight.grad]) and None)


CHANGES = {
    "reads": lambda got: None,
    "clamps": lambda got: tuple(None if g is None else g.clamp(-1e-3, 1e-3) for g in got),
    "halves the second": lambda got: tuple(
        g * 0.5 if i == 1 and g is not None else g for i, g in enumerate(got)
    ),
    "writes": lambda got: [g.mul_(0.5) for g in got if g is not None] and None,
}
WHERE = {
    **{f"legacy hook of {on}": legacy(on) for on in ("a layer", "the model", "every module")},
    "hook of the node": on_output(
        lambda hook, y: node_of(y).register_hook(lambda got, of: hook(got))
    ),
    "prehook of the node": on_output(lambda hook, y: node_of(y).register_prehook(hook)),
    "hook of the weight's turning": on_output(
        lambda hook, y: node_of(y).next_functions[-1][0].register_hook(lambda got, of: hook(got))
    ),
    "hook of the output": on_output(lambda hook, y: y.register_hook(of_one(hook))),
    "hook of the weight": lambda world, hook: layer(world).weight.register_hook(of_one(hook)),
}
HOOKS = {
    f"{where} {change}": (WHERE[where], CHANGES[change]) for where in WHERE for change in CHANGES
}
HOOKS |= {
    f"hook of AccumulateGrad {change}": (at_the_end, CHANGES[change])
    for change in ("reads", "writes")
}


@contextlib.contextmanager
def hooked(world, add, change):
    def hook(got):
        world.see("got", [None if g is None else g.detach() for g in got])
        return change(got)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = add(world, hook)
        try:
            yield
        finally:
            handle.remove()


@deed(weight=0, models=RESIDUALS, backward=EITHER, hook=HOOKS)
def hook_at_a_node(world, hook):
    with hooked(world, *hook):
        world.train()


@deed(weight=0, models=RESIDUALS, backward=EITHER)
def full_hooks_of_a_layer(world):
    module = layer(world)
    handles = [
        module.register_full_backward_pre_hook(lambda module, of: (of[0] * 2,)),
        module.register_full_backward_hook(lambda module, got, of: CHANGES["clamps"](got)),
    ]
    world.train()
    for handle in handles:
        handle.remove()


@deed(weight=0, models=RESIDUALS)
def retained_gradient_of_an_output(world):
    """And a view of it, which is written afterwards."""
    outputs = []

    def retain(hook, y):
        y.retain_grad()
        outputs.append(y)

    with hooked(world, on_output(retain), None):
        world.train()
    world.see("retained", [y.grad for y in outputs])
    for y in outputs:
        y.grad.zero_()


@deed(weight=0, models=RESIDUALS, with_noise=(False, True))
def saved_tensors_hooks(world, with_noise):
    generator = torch.Generator().manual_seed(world.i)

    def unpack(t):
        if with_noise and t.is_floating_point():
            return t + torch.rand(t.shape, generator=generator).to(t.dtype)
        return t

    def pack(t):
        world.see("packed", list(t.shape))
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        world.train()


# Passes


def step_of(compute):
    """An iteration whose gradients compute(world, x) computes."""

    def iteration(world, **choices):
        for optimizer in world.optimizers:
            optimizer.zero_grad()
        world.unsettled.update(range(len(world.optimizers)))
        compute(world, inputs(world.kinds[0], world.model(), world.i), **choices)
        for i in range(len(world.optimizers)):
            world.step(i)
        world.i += 1

    iteration.__name__, iteration.__doc__ = compute.__name__, compute.__doc__
    return iteration


def write_counted(x, g, dy):
    with torch.no_grad():
        x.add_(g, alpha=-1000.0)


WRITES = {
    "read": lambda x, g, dy: None,
    "written by .data": lambda x, g, dy: x.data.add_(g, alpha=-1000.0),
    "written": write_counted,
    "dY written": lambda x, g, dy: dy.zero_(),
}


@deed(weight=0, models=RESIDUALS, write=WRITES)
@step_of
def learned_input(world, x, write):
    """A leaf, which its own hook may write before stock's backward is over."""
    x, kept, order = nn.Parameter(x), [], []
    y = layer(world)(x)
    y.register_hook(kept.append)

    def written(g):
        write(x, g, kept[0])

    x.register_hook(written)
    if layer(world).bias is not None:
        layer(world).bias.register_hook(lambda g: order.append("bias"))
    x.register_hook(lambda g: order.append("x"))
    y.square().mean().backward()
    world.see("input", [x.grad, x.detach(), order])


@deed(
    weight=0,
    models=RESIDUALS,
    backward=EITHER,
    reentrant=(False, True),
    around=("", "forward", "backward", "forward and backward"),
)
@step_of
def checkpoint_and_a_mode(world, x, reentrant, around):
    def mode(when):
        return FlopCounterMode(display=False) if when in around else contextlib.nullcontext()

    x.requires_grad_()
    with mode("forward"):
        y = checkpoint(world.model(), x, use_reentrant=reentrant).square().mean()
    with mode("backward"):
        y.backward()
    world.see("dx", x.grad)


@deed(weight=0, models=RESIDUALS)
@step_of
def gradients_of_many_roots(world, x):
    y = world.model()(x)
    roots, weights = torch.stack([y.detach(), y.detach() * 2]), list(world.model().parameters())
    many = torch.autograd.grad(y, weights, roots, is_grads_batched=True, retain_graph=True)
    world.see("many", list(many))
    y.square().mean().backward()


@deed(weight=0, models=RESIDUALS)
@step_of
def dx_and_dw_in_parts(world, x):
    """As pipelines compute dX before dW, by walking the nodes."""
    model = world.model()
    loss = model(x.requires_grad_()).square().mean()
    dx, groups = stage_backward_input([loss], None, [x], iter(model.parameters()))
    stage_backward_weight(iter(model.parameters()), groups)
    world.see("dx", [dx[0] if isinstance(dx, tuple) else dx])


@deed(weight=0, models=RESIDUALS)
@step_of
def gradient_of_the_input_first(world, x):
    y = world.model()(x.requires_grad_()).square().mean()
    world.see("dx", list(torch.autograd.grad(y, x, retain_graph=True)))
    y.backward()


@deed(weight=0, models=RESIDUALS, kinds=("AdamW", "Lion", "RMSprop"))
@step_of
def backward_to_one_weight(world, x):
    world.model()(x).square().mean().backward(inputs=[layer(world).weight])


def another(world, outputs, of=4):
    """A layer with a fused optimizer of its own, and its gradient."""
    module = nn.Linear(of, outputs, bias=False)
    with torch.no_grad():
        module.weight.copy_(numbers(100 + world.i, outputs, of) / of)
    optimizer = adamw(module.parameters())
    if world.fused:
        world.wrap(optimizer)
    return module, optimizer


@deed(weight=0, models=RESIDUALS)
@step_of
def two_models_of_one_input(world, x):
    """One reads the other's output, too."""
    other, optimizer = another(world, x.shape[-1])
    y = world.model()(x)
    (other(x) + other(y)).square().mean().backward()
    optimizer.step()
    world.see("other", other.weight)


@deed(weight=0, models=RESIDUALS)
@step_of
def trained_input(world, x):
    """A parameter of an optimizer of its own, which may update it inside backward."""
    x = nn.Parameter(x)
    optimizer = adamw([x])
    if world.fused:
        world.wrap(optimizer)
    world.model()(x).square().mean().backward()
    optimizer.step()
    world.see("input", x)


@deed(weight=0, models=RESIDUALS)
@step_of
def root_that_needs_a_gradient(world, x):
    y = layer(world)(x)
    node_of(y).register_prehook(lambda got: world.see("needs", got[0].requires_grad))
    y.backward(torch.ones_like(y).requires_grad_())


def gradient(module, optimizer):
    return module.weight.grad


def clipped_gradient(module, optimizer):
    nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
    return module.weight.grad


def new_weight(module, optimizer):
    optimizer.step()
    optimizer.zero_grad()
    return module.weight.detach()


def new_state(module, optimizer):
    optimizer.step()
    optimizer.zero_grad()
    return optimizer.state[module.weight]["exp_avg"]


@deed(
    weight=0,
    models=RESIDUALS,
    backward=EITHER,
    place=("root", "result of a hook", "input"),
    prepare=(gradient, clipped_gradient, new_weight, new_state),
)
@step_of
def absent_numbers_at_a_layer(world, x, place, prepare):
    """dY, or x, has numbers that are absent, or late."""
    module, optimizer = another(world, x.numel() // x.shape[-1], x.shape[-1])
    module(numbers(200 + world.i, 4, x.shape[-1])).square().mean().backward()
    if place == "input":
        layer(world)(prepare(module, optimizer)).square().mean().backward()
    elif place == "root":
        y = layer(world)(x)
        y.backward(prepare(module, optimizer).view_as(y))
    else:
        y = layer(world)(x)
        y.register_hook(lambda g: prepare(module, optimizer).view_as(g))
        y.square().mean().backward()
    optimizer.step()
