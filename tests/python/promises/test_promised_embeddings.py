# SPDX-License-Identifier: BSD-3-Clause
"""Embeddings, whose gradients are promises in forward mode: most of their rows are zeros."""

import pytest
import torch
import torch.nn.functional as F
from common import adamw, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint

import optfuse
from promises.counted import promises_of
from promises.scripted import equal as equal_for_all
from promises.scripted import script_of, train

WORDS, WIDTH = 70, 24


def equal(script, mode, **wanted):
    """wanted: of the embedding's gradients."""
    equal_for_all(script, mode, shape=(WORDS, WIDTH), **wanted)


class Words(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, **options)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens):
        return self.head(self.words(tokens).tanh())


def tokens(i, shape=(4, 9), most=WORDS):
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(i))


def loss_of(model, i):
    return model(tokens(i)).square().mean()


def training(loss=loss_of, make=adamw, model=Words, steps=5):
    return script_of(lambda *of: train(*of, loss=loss), make, model, steps)


@pytest.mark.parametrize("make", (adamw, sgd))
@pytest.mark.parametrize("mode", ("forward", "backward"))
def test_training_without_a_look(mode, make):
    is_forward = mode == "forward"
    equal(training(make=make), mode, panels=is_forward, made=False, promised=is_forward)


def test_only_the_update_computes_an_embeddings_gradient():
    model = nn.Embedding(WORDS, WIDTH)
    optimizer = optfuse.fuse(adamw(model.parameters()))
    for i in range(5):
        train(model, optimizer, i, loss=loss_of)
    optfuse.flush()
    (layer,) = promises_of(optimizer)
    assert (layer.panels, layer.made, layer.whole) == (4, 0, 0)  # none at the very first use


OPTIONS = (
    ({"padding_idx": 3}, True),
    ({"padding_idx": -1}, True),
    ({"dtype": torch.float64}, True),
    ({"scale_grad_by_freq": True}, False),
    ({"max_norm": 0.5}, False),  # looks at the weight first
    ({"dtype": torch.bfloat16}, False),
)


@pytest.mark.parametrize(("options", "promised"), OPTIONS, ids=str)
def test_options(options, promised):
    def model():
        made = Words(**options)
        return made.to(options.get("dtype", torch.float32))

    equal(training(model=model), "forward", promised=promised)


@pytest.mark.parametrize("kind", ("int32", "one", "the same", "none", "1-D", "strided"))
def test_tokens(kind):
    def loss(model, i):
        found = {
            "int32": tokens(i).int(),
            "one": tokens(i, ()),
            "the same": tokens(i, (200,), most=2),
            "none": tokens(i, (0, 4)),
            "1-D": tokens(i, (7,)),
            "strided": tokens(i, (8, 18))[::2, ::2].t(),
        }[kind]
        return model(found).square().sum()

    equal(training(loss), "forward", promised=kind != "none")


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_special_numbers(dtype):
    """-0.0, which is added to +0, numbers that are no longer normal, infinities and NaN."""
    kinds = (0.0, -0.0, torch.finfo(dtype).tiny / 8, float("inf"), float("-inf"), float("nan"), 1.0)

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        out = model.words(tokens(i, (64,)))
        numbers = torch.Generator().manual_seed(i)
        choice = torch.randint(len(kinds), out.shape, generator=numbers)
        out.backward(torch.tensor(kinds, dtype=dtype)[choice])
        if i % 2:
            yield "gradient", model.words.weight.grad
        optimizer.step()

    make = lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, fused=True)  # noqa: E731
    equal(script_of(iteration, make, lambda: Words().to(dtype)), "forward", promised=True)


def other_uses():
    def tied(model, i):
        return F.linear(model.words(tokens(i)), model.words.weight).square().mean()

    def twice(model, i):
        return (model.words(tokens(i)) * model.words(tokens(i + 100))).square().mean()

    def looked_at_before(model, i):
        return loss_of(model, i) + model.words.weight.norm()

    def looked_at_after(model, i):
        penalty = model.words.weight.pow(2).sum()
        return loss_of(model, i) + penalty

    def checkpointed(model, i, reentrant):
        start = torch.ones((), requires_grad=True)
        y = checkpoint(lambda s: model.words(tokens(i)) * s, start, use_reentrant=reentrant)
        return y.square().mean()

    def cast(model, i):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, i)

    def functional(model, i):
        return F.embedding(tokens(i), model.words.weight, padding_idx=5).square().mean()

    return {
        "tied": tied,
        "two uses": twice,
        "norm before": looked_at_before,
        "penalty": looked_at_after,
        "checkpoint": lambda model, i: checkpointed(model, i, False),
        "reentrant checkpoint": lambda model, i: checkpointed(model, i, True),
        "autocast": cast,
        "functional": functional,
    }


@pytest.mark.parametrize("way", other_uses())
@pytest.mark.parametrize("mode", ("forward", "backward"))
def test_other_uses(way, mode):
    """In these two another use of the weight comes first, the pass without a graph's."""
    comes_late = way in ("penalty", "reentrant checkpoint")
    tied_backward = way == "tied" and mode == "backward"  # the Linear's is a promise
    promised = (mode == "forward" and not comes_late) or tied_backward
    equal(training(other_uses()[way]), mode, promised=promised)


@pytest.mark.parametrize("kind", ("node before", "node after"))
def test_hooks(kind):
    """Also one behind ours, which sees the marked gradient, and may use it or hand on another."""

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        seen = []
        y = model.words(tokens(i))

        def prehook(grads):
            seen.append(grads[0].norm())
            return (grads[0] * 3,) if kind == "node after" else None

        y.grad_fn.register_prehook(prehook)
        y.square().mean().backward()
        yield "seen", seen
        optimizer.step()

    equal(script_of(iteration, model=Words, steps=4), "forward", promised=kind != "node after")


def test_many_tokens_for_few_rows_are_left_alone(monkeypatch):
    monkeypatch.setenv("OPTFUSE_PRODUCTS", "auto")
    model = nn.Embedding(2000, 256)
    optimizer = optfuse.fuse(adamw(model.parameters()))
    for i in range(6):
        train(model, optimizer, i, loss=lambda m, i: m(tokens(i, (999 + i,), 2000)).sum())
    optfuse.flush()
    (layer,) = promises_of(optimizer)
    assert (layer.panels, layer.whole) == (1, 4)
    assert "few rows for so many tokens" in optfuse.explain(optimizer)


def test_compiled_autograd_computes_the_gradient():
    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        loss = model(tokens(i)).square().mean()
        with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
            loss.backward()
        optimizer.step()

    equal(script_of(iteration, model=lambda: nn.Embedding(WORDS, WIDTH)), "forward", promised=False)


def test_a_node_that_fails_leaves_nothing_behind():
    """Its hook has asked for a promise, and its formula never ran."""

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        y = model.words(tokens(i))
        y.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.sum().backward()
        F.embedding(tokens(i), model.other).square().sum().backward()
        optimizer.step()

    class Two(Words):
        def __init__(self):
            super().__init__()
            self.other = nn.Parameter(torch.randn(WORDS, WIDTH))

    equal(script_of(iteration, model=Two, steps=4), "forward", promised=True)
