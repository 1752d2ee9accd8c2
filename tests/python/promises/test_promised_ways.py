# SPDX-License-Identifier: BSD-3-Clause
"""Ways along which a gradient comes: a promise stays one where it is all that comes."""

import pytest
import torch
import torch.nn.functional as F
from common import adamw, everything, sgd
from torch import nn

from promises.scripted import (
    MODES,
    MULTIPLIES,
    STEPS,
    WIDTH,
    batch,
    equal,
    first,
    script_of,
    train,
    wide,
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", (adamw, sgd))
def test_training_without_a_look(mode, make):
    equal(script_of(lambda *of: train(*of), make), mode, panels=True, made=False)


class Block(nn.Module):
    """A transformer's, with the output tied to the embedding of the input."""

    def __init__(self, width=32):
        super().__init__()
        self.words = nn.Embedding(50, width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, tokens):
        x = self.words(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.narrow(F.gelu(self.wide(self.norm(x))))
        return F.linear(x, self.words.weight)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", (adamw, sgd))
def test_a_transformer_over_a_hundred_steps(mode, make):
    def iteration(model, optimizer, i):
        tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if mode == "forward" and i % 20 == 7:
            yield "norm", nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield "loss", loss

    equal(script_of(iteration, make, Block, steps=100), mode, panels=True)


def ways():
    def tied(model, x):
        return F.linear(F.linear(x, first(model)).relu(), first(model)).square().mean()

    def beside_pow(model, x):
        return model(x).square().mean() + first(model).pow(2).sum() * 1e-2

    def beside_einsum(model, x):
        return model(x).square().mean() + torch.einsum("ij,kj->", x, first(model)) * 1e-2

    def beside_transposed(model, x):
        return model(x).square().mean() + (x @ first(model).T).tanh().mean()

    def embedded(model, x):
        rows = F.embedding(torch.tensor([1, 3, 1]), first(model))
        return model(rows + x[:3]).square().mean()

    def three_times(model, x):
        return sum(model(x * k).square().mean() for k in (1.0, 0.5, 0.25))

    def cast(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return (model(x).float() + model(x * 0.5).float()).square().mean()

    def half_cast(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x).float()
        return (y + model(x)).square().mean()

    def transposed_output(model, x):
        return model(x).t().contiguous().view(-1).square().mean()

    return {
        "tied": tied,
        "pow": beside_pow,
        "einsum": beside_einsum,
        "x @ w.T": beside_transposed,
        "embedding": embedded,
        "three uses": three_times,
        "autocast": cast,
        "autocast and not": half_cast,
        "transposed": transposed_output,
        "sum": lambda model, x: model(x).sum(),
        "3-D": lambda model, x: model(x.view(1, 5, WIDTH)).square().mean(),
        "1-D": lambda model, x: model(x[0]).square().mean(),
    }


@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize("mode", MODES)
def test_other_uses_of_the_weight(way, mode):
    loss = ways()[way]

    def iteration(model, optimizer, i):
        train(model, optimizer, i, loss=lambda m, i: loss(m, batch(i)))

    equal(script_of(iteration), mode, promised=way != "autocast" or MULTIPLIES[torch.bfloat16])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", MULTIPLIES)
@pytest.mark.parametrize("make", (adamw, sgd))
def test_autocast(mode, dtype, make):
    """A promise of 16 bits becomes one of 32 on its way to .grad."""

    def loss_of(model, i):
        with torch.autocast("cpu", dtype):
            y = model(batch(i))
        return y.float().square().mean()

    def iteration(model, optimizer, i):
        train(model, optimizer, i, loss=loss_of)
        if i == 1 and mode == "forward":
            yield "gradients", [p.grad for p in model.parameters()]

    is_there = MULTIPLIES[dtype]
    equal(script_of(iteration, make), mode, panels=is_there, promised=is_there)


@pytest.mark.parametrize("forward", (True, False))
def test_backward_under_autocast(forward):
    """There stock's product casts what it gets."""

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            with torch.autocast("cpu", torch.bfloat16, enabled=forward):
                loss = model(batch(i)).float().square().mean()
            loss.backward()
        optimizer.step()

    equal(script_of(iteration, steps=5), "forward", promised=forward and MULTIPLIES[torch.bfloat16])


@pytest.mark.parametrize("where", ("of the cast", "of the weight"))
def test_autocast_and_hooks(where):
    """A hook that casts the gradient once more sees the numbers that it would see in stock."""

    def iteration(model, optimizer, i):
        seen = []
        weight = first(model)
        cast = weight.to(torch.bfloat16)
        watched = cast if where == "of the cast" else weight
        handle = watched.register_hook(lambda g: seen.append(g.to(torch.float64)))
        optimizer.zero_grad()
        F.linear(batch(i).to(torch.bfloat16), cast).float().square().mean().backward()
        handle.remove()
        yield "seen", seen
        optimizer.step()

    equal(script_of(iteration), "forward", promised=MULTIPLIES[torch.bfloat16])


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_that_is_cast_by_hand(mode):
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        y = F.linear(batch(i).double(), first(model).double())
        y.square().mean().backward()
        optimizer.step()

    equal(script_of(iteration), mode, panels=True, made=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", MULTIPLIES)
def test_weights_of_16_bits(mode, dtype):
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        model(batch(i).to(dtype)).float().square().mean().backward()
        optimizer.step()

    is_there = MULTIPLIES[dtype]
    model = lambda: wide().to(dtype)  # noqa: E731
    equal(script_of(iteration, model=model), mode, panels=is_there, promised=is_there)


def test_anomaly_mode():
    def iteration(model, optimizer, i):
        with torch.autograd.detect_anomaly(check_nan=True):
            train(model, optimizer, i)

    with pytest.warns(UserWarning, match="Anomaly"):
        equal(script_of(iteration), "forward", made=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("early", (True, False), ids=("before fuse", "after fuse"))
@pytest.mark.parametrize("kind", ("tensor", "accumulated"))
def test_hooks(mode, early, kind):
    def script(wrap):
        model, norms = wide(), []

        def add():
            if kind == "tensor":
                first(model).register_hook(lambda g: g * 0.5)
            else:
                first(model).register_post_accumulate_grad_hook(
                    lambda p: norms.append(float(p.grad.norm()))
                )

        if early:
            add()
        optimizer = wrap(adamw(model.parameters()))
        if not early and not (mode == "backward" and kind == "accumulated"):
            add()
        for i in range(STEPS):
            train(model, optimizer, i)
        yield "norms", norms
        yield from everything(model, optimizer)

    equal(script, mode)
