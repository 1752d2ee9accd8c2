# SPDX-License-Identifier: BSD-3-Clause
"""Behind a layer whose gradient is promised stand stock's own nodes, so that hooks, saved tensors,
checkpoints and second derivatives are stock's."""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
from common import adamw, everything
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import optfuse
from promises.scripted import MODES, STEPS, WIDTH, equal

SHAPES = ((5, WIDTH), (2, 3, WIDTH), (WIDTH,))


class Residual(nn.Module):
    """Layers beside a residual stream, all three of one shape."""

    def __init__(self, bias):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH, bias) for _ in range(3))

    def forward(self, x):
        h = self.first(x)
        return self.third(h + self.second(torch.tanh(h)))


def numbers(i, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(i))


def node_of(y):
    """The node that multiplies."""
    node = y.grad_fn
    while not node.name().startswith(("Addmm", "Mm")):
        node = node.next_functions[0][0]
    return node


# A deed is given the place: it may add hooks, it computes the gradients, and returns what it saw.


def plain(at):
    at.model(at.x).square().mean().backward()


def legacy(change, on):
    def deed(at):
        if on == "everywhere":
            handle = nn.modules.module.register_module_backward_hook(
                lambda module, got, of: note(got) if isinstance(module, nn.Linear) else None
            )
        else:
            module = at.model.second if on == "layer" else at.model
            handle = module.register_backward_hook(lambda module, got, of: note(got))
        seen = []

        def note(got):
            seen.append([None if g is None else g.shape for g in got])
            return change(got)

        with contextlib.closing(SimpleNamespace(close=handle.remove)):
            plain(at)
        return seen

    return deed


def clamped(got):
    return tuple(None if g is None else g.clamp(-1e-3, 1e-3) for g in got)


def second_halved(got):
    return tuple(g * 0.5 if i == 1 and g is not None else g for i, g in enumerate(got))


def doubled(got):
    got[0].mul_(2)


def full_hooks(at):
    handles = [
        at.model.second.register_full_backward_pre_hook(lambda module, of: (of[0] * 2,)),
        at.model.second.register_full_backward_hook(
            lambda module, got, of: tuple(None if g is None else g * 3 for g in got)
        ),
    ]
    plain(at)
    for handle in handles:
        handle.remove()


def node_hooks(change, before=False):
    def deed(at):
        seen = []

        def hook(got, *_):
            seen.extend(None if g is None else g.norm() for g in got)
            return change(got)

        y = at.model.second(at.x)
        node = node_of(y)
        (node.register_prehook if before else node.register_hook)(hook)
        at.model.third(y).square().mean().backward()
        return seen

    return deed


def turned_hook(at):
    """Of the node that turns the weight, which sees the promise, too."""
    y = at.model.second(at.x)
    turned = node_of(y).next_functions[-1][0]
    turned.register_hook(lambda got, of: (got[0].t().t() * 2,))
    at.model.third(y).square().mean().backward()


def accumulate_hooks(at):
    seen = []
    weight = at.model.second.weight
    end = weight.view_as(weight).grad_fn.next_functions[0][0]
    handle = end.register_hook(lambda *_: seen.append(weight.grad.norm()))
    plain(at)
    handle.remove()
    return seen


def accumulate_hook_changes(at):
    weight = at.model.second.weight
    end = weight.view_as(weight).grad_fn.next_functions[0][0]
    handle = end.register_hook(lambda *_: doubled([weight.grad]))
    plain(at)
    handle.remove()


def leaf_input(write):
    """A learned input, which its own hook writes before stock's backward is over."""

    def deed(at):
        x = nn.Parameter(at.x.detach().clone())
        order = []
        y = at.model.second(x)
        kept = []
        y.register_hook(kept.append)
        x.register_hook(lambda g: write(x, g, kept[0]))
        if at.model.second.bias is not None:
            at.model.second.bias.register_hook(lambda g: order.append("bias"))
        x.register_hook(lambda g: order.append("x"))
        y.square().mean().backward()
        return [x.grad, order]

    return deed


def written_data(x, g, dy):
    x.data.add_(g, alpha=-1000.0)


def written_counted(x, g, dy):
    with torch.no_grad():
        x.add_(g, alpha=-1000.0)


def written_dy(x, g, dy):
    dy.zero_()


def checkpointed(reentrant, around):
    def deed(at):
        def mode(when):
            return FlopCounterMode(display=False) if when in around else contextlib.nullcontext()

        x = at.x.clone().requires_grad_()
        with mode("forward"):
            y = checkpoint(at.model, x, use_reentrant=reentrant).square().mean()
        with mode("backward"):
            y.backward()
        return x.grad

    return deed


def random_unpack(at):
    generator = torch.Generator().manual_seed(at.i)
    noise = functools.partial(torch.rand, generator=generator)
    shapes = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: shapes.append(tuple(t.shape)) or t.detach(), lambda t: t + noise(t.shape)
    )
    with hooks:
        y = at.model.first(at.x.clone().requires_grad_()).square().mean()
    y.backward()
    return shapes


def second_derivative(at):
    weights = list(at.model.parameters())
    loss = at.model(at.x).square().mean()
    grads = torch.autograd.grad(loss, weights, create_graph=True)
    (sum(g.square().sum() for g in grads) + loss).backward()


def batched(at):
    y = at.model(at.x)
    weights = list(at.model.parameters())
    seen = torch.autograd.grad(
        y,
        weights,
        torch.stack([y.detach(), y.detach() * 2]),
        is_grads_batched=True,
        retain_graph=True,
    )
    y.square().mean().backward()
    return seen


def in_parts(at):
    """As pipelines compute dX before dW, by walking the nodes."""
    x = at.x.clone().requires_grad_()
    loss = at.model(x).square().mean()
    dx, groups = stage_backward_input([loss], None, [x], iter(at.model.parameters()))
    stage_backward_weight(iter(at.model.parameters()), groups)
    return dx


def kept_twice(at):
    y = at.model(at.x).square().mean()
    y.backward(retain_graph=True)
    y.backward()


def only_inputs(at):
    x = at.x.clone().requires_grad_()
    y = at.model(x).square().mean()
    (dx,) = torch.autograd.grad(y, x, retain_graph=True)
    y.backward()
    return dx


def other_layer(at):
    """Another layer whose weight has the shape of the output, with its optimizer and a gradient."""
    layer = nn.Linear(WIDTH, at.x.numel() // WIDTH, bias=False)
    optimizer = at.wrap(adamw(layer.parameters()))
    layer(numbers(at.i, (4, WIDTH))).square().mean().backward()
    return layer, optimizer


def root_is(prepare):
    """dY is a tensor whose numbers are absent, or late."""

    def deed(at):
        layer, optimizer = other_layer(at)
        dy = prepare(layer, optimizer)
        y = at.model.second(at.x)
        y.backward(dy if y.dim() == 2 else dy.view_as(y))
        optimizer.step()

    return deed


def hook_returns(prepare):
    def deed(at):
        layer, optimizer = other_layer(at)
        y = at.model.second(at.x)
        y.register_hook(lambda g: prepare(layer, optimizer).view_as(g))
        y.square().mean().backward()
        optimizer.step()

    return deed


def input_is(prepare):
    def deed(at):
        layer, optimizer = other_layer(at)
        at.model.second(prepare(layer, optimizer)).square().mean().backward()
        optimizer.step()

    return deed


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


LATE = {
    "a gradient": gradient,
    "a clipped gradient": clipped_gradient,
    "a new weight": new_weight,
    "new state": new_state,
}

DEEDS = {
    "plain": plain,
    **{
        f"legacy hook of a {on} {name}": legacy(change, on)
        for on in ("layer", "container", "everywhere")
        for name, change in (
            ("reads", lambda got: None),
            ("clamps", clamped),
            ("halves", second_halved),
        )
    },
    "full hooks": full_hooks,
    "node hook reads": node_hooks(lambda got: None),
    "node hook clamps": node_hooks(clamped),
    "node hook halves": node_hooks(second_halved),
    "node prehook reads": node_hooks(lambda got: None, before=True),
    "node prehook changes": node_hooks(lambda got: (got[0] * 2,), before=True),
    "node prehook writes": node_hooks(doubled, before=True),
    "hook of the turned weight": turned_hook,
    "AccumulateGrad hook reads": accumulate_hooks,
    "AccumulateGrad hook writes": accumulate_hook_changes,
    "input written by .data": leaf_input(written_data),
    "input written": leaf_input(written_counted),
    "dY written": leaf_input(written_dy),
    "input read": leaf_input(lambda x, g, dy: None),
    **{
        f"{kind}, a mode around {' and '.join(around) or 'none'}": (
            checkpointed(kind == "reentrant checkpoint", around)
        )
        for kind in ("checkpoint", "reentrant checkpoint")
        for around in ((), ("forward",), ("backward",), ("forward", "backward"))
    },
    "random unpack hooks": random_unpack,
    "second derivative": second_derivative,
    "batched": batched,
    "dX and dW in parts": in_parts,
    "kept twice": kept_twice,
    "inputs first": only_inputs,
    **{
        f"{place} {name}": deed(prepare)
        for place, deed in (
            ("root is", root_is),
            ("hook returns", hook_returns),
            ("input is", input_is),
        )
        for name, prepare in LATE.items()
    },
}
# Backward fusion refuses these: they need a gradient that it has used up.
REFUSED = {"kept twice", *(name for name in DEEDS if name.endswith("gradient"))}
# Deeds of which the test knows whether gradients are promised.
PROMISED = {
    "plain": True,
    "input written": True,
    "node prehook writes": True,
    "random unpack hooks": True,
    "AccumulateGrad hook reads": True,
    "node prehook changes": True,
}


def script_of(deed, bias, shape):
    def script(wrap):
        torch.manual_seed(0)
        model = Residual(bias)
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            at = SimpleNamespace(model=model, x=numbers(i, shape), i=i, wrap=wrap)
            optimizer.zero_grad()
            seen = deed(at)
            yield "seen", seen
            optimizer.step()
        yield from everything(model, optimizer)

    return script


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", DEEDS)
def test_deeds(name, mode, bias):
    is_refused = mode == "backward" and name in REFUSED
    for shape in SHAPES if name == "plain" else SHAPES[:2]:
        with pytest.raises(optfuse.Error) if is_refused else contextlib.nullcontext():
            equal(script_of(DEEDS[name], bias, shape), mode, promised=PROMISED.get(name))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("when", ("fuse", "unfuse"))
@pytest.mark.parametrize("mode", MODES)
def test_fused_between_forward_and_backward(mode, when, bias):
    """Rows, inputs and outputs are as many, so that nothing but the order tells them apart."""

    def trained(changes):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias), nn.Tanh(), nn.Linear(8, 8, bias))
        optimizer = adamw(model.parameters())
        if changes and when == "unfuse":
            optimizer = optfuse.fuse(optimizer, mode)
        x = numbers(0, (8, 8)).requires_grad_()
        loss = checkpoint(model, x, use_reentrant=False).square().mean()
        if changes and when == "fuse":
            optimizer = optfuse.fuse(optimizer, mode)
        elif changes:
            optfuse.unfuse(optimizer)
        loss.backward()
        optimizer.step()
        return [x.grad, *(p.detach().clone() for p in model.parameters())]

    for a, b in zip(trained(True), trained(False), strict=True):
        assert torch.equal(a, b)


def test_compiled_autograd_computes_the_gradient():
    def script(wrap):
        torch.manual_seed(0)
        model = Residual(True)
        optimizer = wrap(adamw(model.parameters()))
        for i in range(2):
            optimizer.zero_grad()
            loss = model(numbers(i, SHAPES[0])).square().mean()
            with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
                loss.backward()
            optimizer.step()
        yield from everything(model, optimizer)

    equal(script, "forward", promised=False)
