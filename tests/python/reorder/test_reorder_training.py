# SPDX-License-Identifier: BSD-3-Clause
"""Models that train with another order of backward have stock's bits: losses, gradients,
weights and state."""

import functools

import pytest
import torch
from common import adamw, everything, refused, sgd
from programs.cases import failures
from programs.deed import DEEDS
from programs.deeds.passes import CALLS
from reorder_scripts import CHOICES, MODES, hooks_of_all, mlp, random, same_reordered, x_of
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import optfuse

STEPS = 6


def training(build, loss, make=adamw, steps=STEPS):
    def script(wrap, arrange):
        model = build()
        arrange(model)
        optimizer = wrap(make(p for p in model.parameters() if p.requires_grad))
        for i in range(steps):
            optimizer.zero_grad()
            value = loss(model, i)
            value.backward()
            optimizer.step()
            yield "loss", value
        yield from everything(model, optimizer)

    return script


def usual(model, i):
    return model(x_of(i)).square().mean()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("make", (sgd, adamw))
def test_an_mlp(choice, mode, make):
    same_reordered(training(mlp, usual, make, steps=50), CHOICES[choice], mode)


@pytest.mark.parametrize("mode", MODES)
def test_layers_by_name(mode):
    same_reordered(training(mlp, usual), {"schedule": ["0", "6"]}, mode)


class Tied(nn.Module):
    """The weight of one layer is used three times, that of another is an embedding's, too."""

    def __init__(self):
        super().__init__()
        self.words, self.inner = nn.Embedding(9, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        hidden = self.words(x)
        for _ in range(3):
            hidden = torch.tanh(self.inner(hidden))
        return self.head(hidden + self.words(x.flip(0)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("choice", ("last", "reverse_first", "budget"))
def test_tied_weights(choice, mode):
    def loss(model, i):
        words = (9 * random(i, 4, 5).sin().abs()).long()
        return nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())

    same_reordered(training(Tied, loss), CHOICES[choice], mode)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (
            nn.MultiheadAttention(8, 2, batch_first=True, **options)
            for options in ({}, {"kdim": 6, "vdim": 4})
        )

    def forward(self, x):
        x = x + self.first(x, x, x, need_weights=False)[0]
        return self.second(x, x[..., :6], x[..., :4], need_weights=False)[0]


class Residual(nn.Module):
    """dY goes to a layer and past it, and an activation is computed in place."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.cell = nn.LSTM(8, 8)

    def forward(self, x):
        x = x + self.down(torch.relu_(self.up(x)))
        return x + self.cell(x)[0]


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, stride=2, groups=8),
            nn.Conv2d(8, 4, 1, padding="same"),
            nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        )
        self.head = nn.Linear(4 * 9, 3)

    def forward(self, x):
        return self.head(self.parts(x).flatten(1))


def of_images(model, i):
    return model(random(i, 2, 1, 8, 8)).square().sum()


def square_of_output(*shape):
    return lambda model, i: model(random(i, *shape)).square().mean()


MODELS = {
    "attention": (Attention, square_of_output(2, 5, 8)),
    "residual": (Residual, square_of_output(3, 5, 8)),
    "convolutions": (Convolutions, of_images),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
        square_of_output(2, 5, 8),
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("choice", ("last", "reverse_first"))
@pytest.mark.parametrize("model", MODELS)
def test_models(model, choice, mode):
    same_reordered(training(*MODELS[model]), CHOICES[choice], mode)


@pytest.mark.parametrize("mode", (None, "forward"))
@pytest.mark.parametrize("call", CALLS)
def test_ways_to_call_and_to_differentiate(call, mode):
    def build():
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    script = training(build, lambda model, i: CALLS[call](model, random(i, 5, 6)).square().mean())
    if call in ("vmap", "forward-mode AD"):
        refused(lambda: same_reordered(script, CHOICES["last"], mode), way_out="call remove()")
    else:
        same_reordered(script, CHOICES["last"], mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_reentrant_checkpoint_is_computed_in_stocks_order(mode):
    def loss(model, i):
        x = checkpoint(model[:4], x_of(i).requires_grad_(), use_reentrant=True)
        return model[4:](x).square().mean()

    same_reordered(training(mlp, loss), CHOICES["last"], mode)
    model = mlp()
    with optfuse.reorder(model, "last") as reordering:
        loss(model, 0).backward()
        turns = {row.layer: (row.turn, row.note) for row in reordering.plan.rows}
    assert turns["8"] == (0, "")
    assert turns["0"] == (None, "recomputed in backward (reentrant checkpoint)")


def test_anomaly_mode_names_the_layer():
    model = mlp()
    with (
        optfuse.reorder(model, "last"),
        pytest.warns(UserWarning, match="optfuse dX of 8"),
        torch.autograd.detect_anomaly(check_nan=True),
        pytest.raises(RuntimeError, match="optfuse dX of 8"),
    ):
        with torch.no_grad():
            model[8].weight.fill_(float("nan"))
        model(x_of(0)).nan_to_num().square().sum().backward()


@pytest.mark.parametrize("choice", ({"schedule": "last"}, {"schedule": "auto", "network": (0, 0)}))
def test_no_hook_of_all_optimizers_stays(choice):
    """With one, each step() of an optimizer of ours would take PyTorch's longer way."""
    model = mlp()
    optimizer = optfuse.fuse(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):  # a second one is watched, too
        with optfuse.reorder(model, **choice) as reordering:
            assert len(hooks_of_all()) == 1
            for i in range(10):
                optimizer.zero_grad()
                model(x_of(i)).sum().backward()
                optimizer.step()
            assert not hooks_of_all()
            assert reordering.plan.choice["schedule"] != "auto"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("when", ("first", "once", "always"))
def test_operators_are_counted(when, choice, mode):
    """As many as in stock: none of what is rehearsed or copied."""

    def script(wrap, arrange):
        model = mlp()
        arrange(model)
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            optimizer.zero_grad()
            if when == "always" or i == {"first": 0, "once": 2}[when]:
                with FlopCounterMode(display=False) as counted:
                    usual(model, i).backward()
                yield "operations", counted.get_total_flops()
            else:
                usual(model, i).backward()
            optimizer.step()
        yield from everything(model, optimizer)

    same_reordered(script, CHOICES[choice], mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE))
def test_selective_checkpoint(policy, mode):
    contexts = functools.partial(
        create_selective_checkpoint_contexts, lambda at, operator, *_, **__: policy
    )

    def loss(model, i):
        x = x_of(i).requires_grad_()
        return checkpoint(model, x, use_reentrant=False, context_fn=contexts).square().mean()

    same_reordered(training(mlp, loss), CHOICES["last"], mode)


KINDS_OF_DEEDS = ("adding", "clipping", "failing", "gradients", "passes", "training")
OF_TRAINING = [
    name
    for name, deed in DEEDS.items()
    if deed.function.__module__.rpartition(".")[2] in KINDS_OF_DEEDS
]


#: With orders, calls and models that reorder() refuses; and gradients behind an exception, which
#: have not been computed by then.
OTHERS = {"iteration_in_another_order", "call_an_mlp_otherwise", "iteration_of_a_model"}
OTHERS |= {"clip_and_step", "look_after_an_exception_in_backward"}


@pytest.mark.parametrize("mode", ("forward", "backward"))
@pytest.mark.parametrize("name", sorted({*OF_TRAINING} - OTHERS))
def test_deeds(name, mode):
    """Accumulating, clipping, scaling, hooks, graphs that are kept, passes that fail."""
    found = failures(name, mode, ("AdamW",), order={"schedule": "last"})
    assert not found, f"{len(found)} cases fail, such as\n" + "\n".join(found[:3])
