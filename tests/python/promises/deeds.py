# SPDX-License-Identifier: BSD-3-Clause
"""Deeds of scripts around the backward pass of layers whose gradients may be promised: hooks of
every kind, and ways to compute gradients. A deed gets a Place, computes or watches, and notes in
`place.seen` what has to be the same as in stock."""

import contextlib
import functools
import warnings
from dataclasses import dataclass, field

import torch
from common import adamw
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode


class Residual(nn.Module):
    """Layers beside a residual stream, all three of one shape."""

    def __init__(self, width, bias, dtype=None):
        super().__init__()
        layers = (nn.Linear(width, width, bias, dtype=dtype) for _ in range(3))
        self.first, self.second, self.third = layers

    def forward(self, x):
        h = self.first(x)
        return self.third(h + self.second(torch.tanh(h)))


@dataclass
class Place:
    """One iteration of training. wrap: fuses an optimizer, or leaves it."""

    model: Residual
    x: torch.Tensor
    i: int
    wrap: object
    seen: list = field(default_factory=list)

    @property
    def width(self):
        return self.x.shape[-1]

    def leaf(self):
        return self.x.detach().clone().requires_grad_()

    def note(self, tensors):
        self.seen += [None if t is None else t.detach().clone() for t in tensors]


def node_of(y):
    """The node that multiplies."""
    node = y.grad_fn
    while not node.name().startswith(("Addmm", "Mm")):
        node = node.next_functions[0][0]
    return node


# Hooks. Each function returns what takes them off again.

READ = "reads"
CHANGES = {
    READ: lambda got: None,
    "clamps": lambda got: tuple(None if g is None else g.clamp(-1e-3, 1e-3) for g in got),
    "halves the second": lambda got: tuple(
        g * 0.5 if i == 1 and g is not None else g for i, g in enumerate(got)
    ),
    "writes": lambda got: [g.mul_(0.5) for g in got if g is not None] and None,
}


def noting(place, change):
    def hook(got):
        place.note(got)
        return change(got)

    return hook


def legacy(change, on):
    def add(place):
        hook = noting(place, change)
        if on == "every module":
            return nn.modules.module.register_module_backward_hook(
                lambda module, got, of: hook(got) if isinstance(module, nn.Linear) else None
            ).remove
        module = place.model.second if on == "a layer" else place.model
        return module.register_backward_hook(lambda module, got, of: hook(got)).remove

    return add


def full(place):
    module = place.model.second
    hook = noting(place, CHANGES["clamps"])
    handles = [
        module.register_full_backward_pre_hook(lambda module, of: (of[0] * 2,)),
        module.register_full_backward_hook(lambda module, got, of: hook(got)),
    ]
    return lambda: [handle.remove() for handle in handles]


def on_output(register):
    """register(place, y): adds hooks behind the output of the second layer."""

    def add(place):
        def behind(module, given, y):
            if y.grad_fn is not None:
                register(place, y)

        return place.model.second.register_forward_hook(behind).remove

    return add


def node_hook(change):
    return on_output(
        lambda place, y: node_of(y).register_hook(lambda got, of: noting(place, change)(got))
    )


def node_prehook(change):
    return on_output(lambda place, y: node_of(y).register_prehook(noting(place, change)))


def turned_hook(change):
    """A hook of the node that turns the weight."""
    return on_output(
        lambda place, y: (
            node_of(y)
            .next_functions[-1][0]
            .register_hook(lambda got, of: noting(place, change)(got))
        )
    )


def tensor_hook(change):
    def hook(place, g):
        changed = noting(place, change)((g,))
        return None if changed is None else changed[0]

    return on_output(lambda place, y: y.register_hook(functools.partial(hook, place)))


def weight_hook(change):
    def add(place):
        def hook(g):
            changed = noting(place, change)((g,))
            return None if changed is None else changed[0]

        return place.model.second.weight.register_hook(hook).remove

    return add


def accumulate_hook(change):
    def add(place):
        weight = place.model.second.weight
        end = weight.view_as(weight).grad_fn.next_functions[0][0]

        def hook(got, of):
            place.note([weight.grad])
            change([weight.grad])

        handle = end.register_hook(hook)
        return lambda: (end, handle.remove())

    return add


def retained(place):
    """The output's gradient, and a view that is written afterwards."""
    outputs = []

    def retain(place, y):
        y.retain_grad()
        outputs.append(y)

    remove = on_output(retain)(place)

    def end():
        remove()
        place.note([y.grad for y in outputs])
        for y in outputs:
            if y.grad is not None:
                y.grad.zero_()

    return end


def saved_hooks(unpack):
    def add(place):
        generator = torch.Generator().manual_seed(place.i)
        shapes = place.seen
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: shapes.append(tuple(t.shape)) or t.detach(), lambda t: unpack(t, generator)
        )
        hooks.__enter__()
        return lambda: hooks.__exit__(None, None, None)

    return add


def noisy(t, generator):
    return t + torch.rand(t.shape, generator=generator).to(t.dtype) if t.is_floating_point() else t


HOOKS = {
    **{
        f"legacy hook of {on} {name}": legacy(CHANGES[name], on)
        for on in ("a layer", "the model", "every module")
        for name in CHANGES
    },
    "full hooks": full,
    **{
        f"{where} {name}": hook(CHANGES[name])
        for where, hook in {
            "hook of the node": node_hook,
            "prehook of the node": node_prehook,
            "hook of the weight's turning": turned_hook,
            "hook of the output": tensor_hook,
            "hook of the weight": weight_hook,
        }.items()
        for name in CHANGES
    },
    "hook of AccumulateGrad reads": accumulate_hook(CHANGES[READ]),
    "hook of AccumulateGrad writes": accumulate_hook(CHANGES["writes"]),
    "retained gradient": retained,
    "saved tensors": saved_hooks(lambda t, generator: t),
    "saved tensors with noise": saved_hooks(noisy),
}


# Passes. Each computes gradients of the model's weights.


def plain(place):
    place.model(place.x).square().mean().backward()


def two_uses(place):
    (place.model(place.x) + place.model(place.x * 0.5)).square().mean().backward()


def learned_input(write):
    """A leaf, which its own hook may write before stock's backward is over."""

    def compute(place):
        x, layer = nn.Parameter(place.x.detach().clone()), place.model.second
        y = layer(x)
        kept, order = [], place.seen
        y.register_hook(kept.append)
        x.register_hook(lambda g: write(x, g, kept[0]))
        if layer.bias is not None:
            layer.bias.register_hook(lambda g: order.append("bias"))
        x.register_hook(lambda g: order.append("x"))
        y.square().mean().backward()
        place.note([x.grad, x])

    return compute


def write_data(x, g, dy):
    x.data.add_(g, alpha=-1000.0)


def write_counted(x, g, dy):
    with torch.no_grad():
        x.add_(g, alpha=-1000.0)


def write_dy(x, g, dy):
    dy.zero_()


def checkpointed(reentrant, around):
    def compute(place):
        def mode(when):
            return FlopCounterMode(display=False) if when in around else contextlib.nullcontext()

        x = place.leaf()
        with mode("forward"):
            y = checkpoint(place.model, x, use_reentrant=reentrant).square().mean()
        with mode("backward"):
            y.backward()
        place.note([x.grad])

    return compute


def second_derivative(place):
    weights = list(place.model.parameters())
    loss = place.model(place.x).square().mean()
    grads = torch.autograd.grad(loss, weights, create_graph=True)
    (sum(g.square().sum() for g in grads) + loss).backward()


def batched(place):
    y = place.model(place.x)
    roots = torch.stack([y.detach(), y.detach() * 2])
    weights = list(place.model.parameters())
    place.note(torch.autograd.grad(y, weights, roots, is_grads_batched=True, retain_graph=True))
    y.square().mean().backward()


def functional(place):
    """torch.func's gradients, put into .grad by hand."""
    model = place.model

    def loss(weights):
        return torch.func.functional_call(model, weights, place.x).square().mean()

    grads = torch.func.grad(loss)(dict(model.named_parameters()))
    for name, p in model.named_parameters():
        p.grad = grads[name].detach()


def in_parts(place):
    """As pipelines compute dX before dW, by walking the nodes."""
    x = place.leaf()
    loss = place.model(x).square().mean()
    dx, groups = stage_backward_input([loss], None, [x], iter(place.model.parameters()))
    stage_backward_weight(iter(place.model.parameters()), groups)
    place.note([dx[0] if isinstance(dx, tuple) else dx])


def kept_twice(place):
    y = place.model(place.x).square().mean()
    y.backward(retain_graph=True)
    y.backward()


def inputs_first(place):
    x = place.leaf()
    y = place.model(x).square().mean()
    place.note(torch.autograd.grad(y, x, retain_graph=True))
    y.backward()


def some_inputs(place):
    place.model(place.x).square().mean().backward(inputs=[place.model.second.weight])


def shared(place):
    """Two models, trained by two optimizers, read one input; one reads the other's output, too."""
    generator = torch.Generator().manual_seed(place.i)
    other = nn.Linear(place.width, place.width, bias=False, dtype=place.x.dtype)
    with torch.no_grad():
        other.weight.copy_(torch.randn(other.weight.shape, generator=generator) / place.width)
    optimizer = place.wrap(adamw(other.parameters()))
    y = place.model(place.x)
    (other(place.x) + other(y)).square().mean().backward()
    optimizer.step()
    place.note(other.parameters())


def other_layer(place):
    """Another layer whose weight has the shape of the output, with its optimizer and a gradient."""
    layer = nn.Linear(place.width, place.x.numel() // place.width, bias=False, dtype=place.x.dtype)
    generator = torch.Generator().manual_seed(place.i)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
    optimizer = place.wrap(adamw(layer.parameters()))
    x = torch.randn(4, place.width, generator=generator).to(place.x.dtype)
    layer(x).square().mean().backward()
    return layer, optimizer


def trained_input(place):
    """A parameter of an optimizer of its own, which may update it inside backward."""
    x = nn.Parameter(place.x.detach().clone())
    optimizer = place.wrap(adamw([x]))
    place.model(x).square().mean().backward()
    optimizer.step()
    place.note([x])


def root_needs_gradient(place):
    y = place.model.second(place.x)
    node_of(y).register_prehook(lambda got: place.seen.append(got[0].requires_grad))
    y.backward(torch.ones_like(y).requires_grad_())


def root_is(prepare):
    """dY is a tensor whose numbers are absent, or late."""

    def compute(place):
        layer, optimizer = other_layer(place)
        dy = prepare(layer, optimizer)
        y = place.model.second(place.x)
        y.backward(dy if y.dim() == 2 else dy.view_as(y))
        optimizer.step()

    return compute


def hook_returns(prepare):
    def compute(place):
        layer, optimizer = other_layer(place)
        y = place.model.second(place.x)
        y.register_hook(lambda g: prepare(layer, optimizer).view_as(g))
        y.square().mean().backward()
        optimizer.step()

    return compute


def input_is(prepare):
    def compute(place):
        layer, optimizer = other_layer(place)
        place.model.second(prepare(layer, optimizer)).square().mean().backward()
        optimizer.step()

    return compute


def gradient(layer, optimizer):
    return layer.weight.grad


def clipped_gradient(layer, optimizer):
    nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)
    return layer.weight.grad


def new_weight(layer, optimizer):
    optimizer.step()
    optimizer.zero_grad()
    return layer.weight.detach()


def new_state(layer, optimizer):
    optimizer.step()
    optimizer.zero_grad()
    return optimizer.state[layer.weight]["exp_avg"]


PASSES = {
    "plain": plain,
    "two uses": two_uses,
    **{
        f"learned input, {name}": learned_input(write)
        for name, write in {
            "read": lambda x, g, dy: None,
            "written by .data": write_data,
            "written": write_counted,
            "dY written": write_dy,
        }.items()
    },
    **{
        f"{kind}, a mode around {' and '.join(around) or 'none'}": (
            checkpointed(kind == "reentrant checkpoint", around)
        )
        for kind in ("checkpoint", "reentrant checkpoint")
        for around in ((), ("forward",), ("backward",), ("forward", "backward"))
    },
    "second derivative": second_derivative,
    "batched": batched,
    "functional": functional,
    "dX and dW in parts": in_parts,
    "kept twice": kept_twice,
    "inputs first": inputs_first,
    "some inputs": some_inputs,
    "two models": shared,
    "trained input": trained_input,
    "root that needs one of its own": root_needs_gradient,
    **{
        f"{place} {name}": deed(prepare)
        for place, deed in {
            "root is": root_is,
            "hook returns": hook_returns,
            "input is": input_is,
        }.items()
        for name, prepare in {
            "a gradient": gradient,
            "a clipped gradient": clipped_gradient,
            "a new weight": new_weight,
            "new state": new_state,
        }.items()
    },
}
#: Backward fusion refuses these: they need a gradient that it has used up.
REFUSED = {"kept twice", *(name for name in PASSES if name.endswith("gradient"))}


def do(place, hooks, compute):
    """Computes gradients while these hooks are on, by their names. PyTorch warns of some."""
    with contextlib.ExitStack() as on:
        on.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for name in hooks:
            on.callback(HOOKS[name](place))
        PASSES[compute](place)
