# SPDX-License-Identifier: BSD-3-Clause
"""Forward mode needs no knowledge of the model: every way to use a parameter
launches its update first."""

import pytest
import torch
from common import adamw, everything, same, sgd
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

STEPS = 5


def training(build, loss, make=adamw, look=None, parameters=None):
    """A script over build() and loss(model, i); look(model) after each step."""

    def script(wrap):
        model = build()
        given = parameters(model) if parameters else model.parameters()
        optimizer = wrap(make(given))
        for i in range(STEPS):
            optimizer.zero_grad()
            value = loss(model, i)
            value.backward()
            optimizer.step()
            wrap.pending()
            yield "loss", value
            if look:
                yield "look", look(model)
        yield from everything(model, optimizer)

    return script


def numbers(i, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(i))


def square_of_output(*shape):
    def loss(model, i):
        out = model(numbers(i, *shape))
        return (out[0] if isinstance(out, tuple) else out).square().mean()

    return loss


# Parameters in unusual places


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        ids = x.abs().mul(3).long().clamp_(0, 10)
        return self.head(torch.tanh(self.body(self.embed(ids))))


class Sliced(nn.Module):
    """A layer that uses a part of its weight, another part every time."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6))

    def forward(self, x):
        start = int(x.abs().sum()) % 4
        return x @ self.weight[start : start + 4].t()


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.left(x) if x.sum() > 0 else self.right(x)


class OfOneStorage(nn.Module):
    """Parameters that are parts of one storage; overlap: the same elements."""

    def __init__(self, overlap):
        super().__init__()
        flat = torch.randn(72)
        self.first = nn.Parameter(flat[:36].view(6, 6))
        self.second = nn.Parameter((flat[:36] if overlap else flat[36:]).view(6, 6))
        self.own = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return torch.tanh(x @ self.first) @ self.second @ self.own


class WithAnAlias(nn.Module):
    """The module keeps a second name for the memory of its weight."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("alias", self.layer.weight.detach())

    def forward(self, x):
        return self.layer(x) + x @ self.alias


def with_frozen_and_unused():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[0].weight.requires_grad_(False)
    model.unused = nn.Linear(3, 3)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    return model


UNUSUAL = {
    "tied": Tied,
    "sliced": Sliced,
    "branching": Branching,
    "two in one storage": lambda: OfOneStorage(overlap=False),
    "the same elements twice": lambda: OfOneStorage(overlap=True),
    "an alias in a buffer": WithAnAlias,
    "frozen and unused": with_frozen_and_unused,
    "channels_last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("model", UNUSUAL)
@pytest.mark.parametrize("make", (adamw, sgd))
def test_parameters_in_unusual_places(model, make):
    shape = (2, 3, 5, 5) if model == "channels_last" else (5, 6)
    same(training(UNUSUAL[model], square_of_output(*shape), make))


def test_a_parameter_that_is_a_slice_of_a_tensor_in_use():
    def script(wrap):
        base = torch.ones(20)
        model = nn.Linear(2, 3)
        part = nn.Parameter(base[4:10].view(3, 2))
        optimizer = wrap(adamw([part, *model.parameters()]))
        for i in range(STEPS):
            optimizer.zero_grad()
            (model(numbers(i, 4, 2)) + numbers(i, 4, 2) @ part.t()).square().sum().backward()
            optimizer.step()
            yield "base", base

    same(script)


def test_two_optimizers_share_a_parameter():
    def script(wrap):
        model = nn.Linear(6, 6)
        first, second = wrap(adamw(model.parameters())), wrap(sgd([model.weight]))
        for i in range(STEPS):
            first.zero_grad()
            model(numbers(i, 5, 6)).square().sum().backward()
            first.step()
            wrap.pending(first)
            second.step()
            wrap.pending(second)
        yield "second", second.state_dict()
        yield from everything(model, first)

    same(script)


# Modules of torch.nn


def built_twice(module):
    return nn.Sequential(module(), nn.Tanh(), module())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        return self.out(self.attention(x, x, x, need_weights=False)[0])


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(6, 8, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


def encoder_layer():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def orthogonal():
    return parametrizations.orthogonal(nn.Linear(6, 6))


MODULES = {
    "Conv2d and BatchNorm2d": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)),
        (2, 3, 8, 8),
    ),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 4, 3), (2, 3, 5, 5)),
    "LayerNorm": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)), (5, 6)),
    "Bilinear": (lambda: Self(nn.Bilinear(6, 6, 4)), (5, 6)),
    "PReLU": (lambda: nn.Sequential(nn.Linear(6, 6), nn.PReLU()), (5, 6)),
    "MultiheadAttention": (Attention, (2, 5, 8)),
    "TransformerEncoderLayer": (encoder_layer, (2, 5, 8)),
    "LSTM": (lambda: Recurrent(nn.LSTM), (2, 5, 6)),
    "GRU": (lambda: Recurrent(nn.GRU), (2, 5, 6)),
    "weight_norm": (
        lambda: built_twice(lambda: parametrizations.weight_norm(nn.Linear(6, 6))),
        (5, 6),
    ),
    "spectral_norm": (
        lambda: built_twice(lambda: parametrizations.spectral_norm(nn.Linear(6, 6))),
        (5, 6),
    ),
    "orthogonal": (lambda: built_twice(orthogonal), (5, 6)),
}


class Self(nn.Module):
    """A module of two inputs, given the same one twice."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, x)


@pytest.mark.parametrize("module", MODULES)
def test_modules_of_torch_nn(module):
    build, shape = MODULES[module]

    def look(model):
        model.eval()
        with torch.no_grad():
            out = model(numbers(99, *shape))
        model.train()
        return out

    same(training(build, square_of_output(*shape)))
    same(training(build, square_of_output(*shape), look=look))


def test_the_fast_path_of_the_transformer_encoder():
    def look(model):
        model.eval()
        with torch.inference_mode():
            out = model(numbers(99, 2, 5, 8))
        model.train()
        return out

    def build():
        return nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)

    same(training(build, square_of_output(2, 5, 8), look=look))


# Ways to call and to differentiate


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def with_checkpoint(use_reentrant):
    def loss(model, i):
        x = numbers(i, 5, 6).requires_grad_()
        hidden = checkpoint(model[:2], x, use_reentrant=use_reentrant)
        return model[2](hidden).square().mean()

    return loss


def with_functional_call(model, i):
    weights = dict(model.named_parameters())
    return torch.func.functional_call(model, weights, (numbers(i, 5, 6),)).square().mean()


def with_vmap(model, i):
    weights = dict(model.named_parameters())

    def one(row):
        return torch.func.functional_call(model, weights, (row,)).square().mean()

    return torch.vmap(one)(numbers(i, 5, 6)).mean()


def with_autocast(model, i):
    with torch.autocast("cpu", torch.bfloat16):
        return model(numbers(i, 5, 6)).float().square().mean()


def with_double_backward(model, i):
    x = numbers(i, 5, 6).requires_grad_()
    out = model(x).square().mean()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    return out + slope.square().sum()


def with_create_graph(model, i):
    """Double backward through the weights themselves."""
    out = model(numbers(i, 5, 6)).square().mean()
    slopes = torch.autograd.grad(out, list(model.parameters()), create_graph=True)
    return out + sum(s.square().sum() for s in slopes)


def with_forward_ad(model, i):
    import torch.autograd.forward_ad as forward_ad

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(numbers(i, 5, 6), torch.ones(5, 6))
        return forward_ad.unpack_dual(model(dual)).primal.square().mean()


def with_saved_tensor_hooks(model, i):
    with torch.autograd.graph.save_on_cpu():
        return model(numbers(i, 5, 6)).square().mean()


CALLS = {
    "checkpoint, reentrant": with_checkpoint(True),
    "checkpoint": with_checkpoint(False),
    "functional_call": with_functional_call,
    "vmap": with_vmap,
    "autocast": with_autocast,
    "double backward": with_double_backward,
    "create_graph": with_create_graph,
    "forward-mode AD": with_forward_ad,
    "saved-tensor hooks": with_saved_tensor_hooks,
}


@pytest.mark.parametrize("call", CALLS)
def test_ways_to_call_and_to_differentiate(call):
    same(training(mlp, CALLS[call]))


def test_gradients_by_func_grad_set_by_hand():
    def script(wrap):
        model = mlp()
        optimizer = wrap(adamw(model.parameters()))

        def loss(weights, x):
            return torch.func.functional_call(model, weights, (x,)).square().mean()

        for i in range(STEPS):
            slopes = torch.func.grad(loss)(dict(model.named_parameters()), numbers(i, 5, 6))
            for name, p in model.named_parameters():
                p.grad = slopes.pop(name).detach()
            optimizer.step()
            wrap.pending()
        yield from everything(model, optimizer)

    same(script)


def test_per_sample_gradients_while_pending():
    def look(model):
        weights = {k: v.detach() for k, v in model.named_parameters()}

        def loss(weights, row):
            return torch.func.functional_call(model, weights, (row,)).square().mean()

        return torch.vmap(torch.func.grad(loss), (None, 0))(weights, numbers(7, 5, 6))

    same(training(mlp, square_of_output(5, 6), look=look))


@pytest.mark.parametrize("clip", (False, True))
def test_grad_scaler_with_unscale_and_clip(clip):
    def script(wrap):
        model = mlp()
        optimizer = wrap(adamw(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        for i in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(numbers(i, 5, 6)).float().square().mean()
            if i == 3:
                loss = loss * float("inf")  # this step must be skipped
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                yield "norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            yield "scale", scaler.get_scale()
        yield from everything(model, optimizer)

    same(script)
