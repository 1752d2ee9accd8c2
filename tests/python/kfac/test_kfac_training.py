# SPDX-License-Identifier: BSD-3-Clause
"""optfuse.kfac() in other forms of training: what is counted, and that it is counted once."""

import contextlib

import pytest
import torch
from common import Stock
from kfac_cases import (
    MODELS,
    OFTEN,
    SELDOM,
    STEPS,
    Ours,
    Second,
    adamw,
    agree,
    assert_close,
    gpt_loss,
    mean_of,
    mlp,
    mlp_loss,
    played,
    played_close,
    rows,
    same_bits,
    seen,
    sgd,
    training,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import optfuse

MODES = pytest.mark.parametrize("mode", (None, "forward"), ids=("stock", "fused"))


# Accumulation


@MODES
@pytest.mark.parametrize("sizes", ([4, 4, 4], [7, 1, 3]), ids=("equal", "unequal"))
@pytest.mark.parametrize("model", ("mlp", "conv net"))
def test_accumulation_of_micro_batches(model, sizes, mode):
    """Each loss counts as its share of the batch."""
    loss_of = MODELS[model][1]

    def losses(model, i):
        for part, n in enumerate(sizes):
            yield loss_of(model, 3 * i + part, n) * (n / sum(sizes))

    agree(training(model, loss=losses, names=("0", "2"), **SELDOM), mode)


@pytest.mark.parametrize("parts", ([6, 6], [1, 4, 7]))
def test_micro_batches_are_the_whole_batch(parts):
    def of(parts):
        def losses(model, i):
            for x in rows(i, 12, 6).split(parts):
                yield mean_of(model(x)) * len(x) / 12

        return training("mlp", adamw, losses, **OFTEN)

    played_close(of(parts), of([12]))


def test_forward_passes_before_the_first_backward():
    """The order of the backward passes is another one than that of the forward passes."""

    def losses(model, i):
        first, second, third = (mlp_loss(model, 3 * i + part, 3 + part) for part in range(3))
        return second, third, first

    agree(training("mlp", loss=losses, **SELDOM))


# Checkpointing


@MODES
@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("preserve", (False, True))
def test_checkpointing_counts_once(reentrant, preserve, mode):
    options = {"use_reentrant": reentrant, "preserve_rng_state": preserve}

    def plain(model, i):
        return mean_of(model(rows(i, 7, 6).requires_grad_()))

    def checkpointed(model, i):
        y = checkpoint(model[:4], rows(i, 7, 6).requires_grad_(), **options)
        return mean_of(checkpoint(model[4:], y, **options))

    agree(training("mlp", loss=checkpointed, **SELDOM), mode)
    played_close(*(training("mlp", loss=loss, **SELDOM) for loss in (checkpointed, plain)))


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpoints_within_checkpoints(reentrant):
    def loss(model, i):
        def outer(x):
            return model[6:](checkpoint(model[2:6], model[:2](x), use_reentrant=reentrant))

        x = rows(i, 7, 6).requires_grad_()
        return mean_of(checkpoint(outer, x, use_reentrant=reentrant))

    agree(training("mlp", loss=loss, **SELDOM))


def test_a_checkpointed_convolution_before_an_activation_in_place():
    def loss(model, i):
        return mean_of(model[5:](checkpoint(model[:5], rows(i, 6, 2, 6, 6), use_reentrant=False)))

    agree(training("conv net", loss=loss, **SELDOM))


# Weights that are used several times


class Tied(nn.Module):
    """An autoencoder whose halves share weight and bias, beside a layer that is used three
    times, of which the last has other rows."""

    def __init__(self, bias):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.first, self.second = (nn.Linear(6, 6, bias=bias) for _ in range(2))
        self.second.weight = self.first.weight
        self.second.bias = self.first.bias

    def forward(self, x):
        y = torch.tanh(self.inner(torch.relu_(self.inner(x))))
        y = self.second(torch.tanh(self.first(y)))
        return y + self.inner(y[:2]).sum(0)


@MODES
@pytest.mark.parametrize("bias", (False, True))
def test_tied_layers_are_one_layer(bias, mode):
    def loss(model, i):
        return mean_of(model(rows(i, 5, 6)))

    names = ("inner", "first")
    agree(training(lambda: Tied(bias).double(), loss=loss, names=names, **SELDOM), mode)


def test_a_convolution_that_is_used_twice():
    def loss(model, i):
        return mean_of(model(torch.relu_(model(rows(i, 4, 2, 5, 5)))))

    def build():
        return nn.Conv2d(2, 2, 3, padding=1).double()

    agree(training(build, loss=loss, names=[""], **SELDOM))


def test_the_number_of_uses_may_change():
    def loss(model, i):
        x = rows(i, 5, 6)
        for _ in range(i % 3):
            x = torch.tanh(model[0](x))
        return mean_of(model(x))

    agree(training(lambda: mlp(width=6, layers=1), loss=loss, names=("0", "2"), **OFTEN))


# Layers that contribute nothing


class Forked(nn.Module):
    """`other` is used when it is asked for, or, past its module, by a product that nothing sees."""

    def __init__(self):
        super().__init__()
        self.first, self.other, self.head = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x, how):
        y = torch.tanh(self.first(x))
        if how == "module":
            y = torch.tanh(self.other(y))
        elif how == "product":
            y = torch.tanh(y @ self.other.weight.T + self.other.bias)
        return self.head(y)


def forked(every, unseen, **options):
    """Training in which `other` is seen in every second or third step only."""

    def how(i):
        return "module" if i % every == 0 else unseen

    def keep(model, arranged, i):
        grad = model.other.weight.grad
        model.kept = None if grad is None else grad.clone()

    def untouched(model, arranged, i):
        if unseen == "product":
            same = torch.equal(model.other.weight.grad, model.kept)
            assert same == (how(i) == "product"), f"step {i}"
        return ()

    def loss(model, i):
        return mean_of(model(rows(i, 5, 6), how(i)))

    names = ("first", "other", "head")
    return training(lambda: Forked().double(), sgd, loss, names, keep, untouched, **options)


@MODES
@pytest.mark.parametrize("unseen", ("none", "product"))
def test_missing_layers_may_be_left_as_they_are(unseen, mode):
    agree(forked(3, unseen, **OFTEN, missing="skip"), mode)


def test_a_layer_may_be_missing_between_two_factor_steps():
    agree(forked(2, "none", **SELDOM))


# Passes that are not meant


def evaluating(model, i):
    loss = gpt_loss(model, i)
    with torch.no_grad() if i % 2 else torch.inference_mode():
        gpt_loss(model.eval(), 100 + i)
    model.train()
    return loss


def evaluated(model, arranged, i):
    with torch.no_grad():
        gpt_loss(model, 200 + i)


def test_evaluation_is_not_counted():
    looks = training("gpt", sgd, evaluating, before_step=evaluated, **SELDOM)
    agree(looks)
    same_bits(looks, training("gpt", **SELDOM))


@pytest.mark.parametrize("what", ("backward", "forward", "both"))
def test_discarded_passes_are_not_counted(what):
    def discard(model, arranged, i):
        loss = mlp_loss(model, 101 + i)
        if what != "forward":
            loss.backward()
        if what != "backward":
            mlp_loss(model, 201 + i)
        arranged.discard()
        return ()

    looks = training("mlp", after_step=discard, **SELDOM)
    agree(looks)
    same_bits(looks, training("mlp", **SELDOM))


# Beside other parts of optfuse


@pytest.mark.parametrize("first", ("reorder", "kfac"))
@pytest.mark.parametrize("schedule", ("last", "reverse_first"))
@MODES
def test_beside_reorder(schedule, first, mode):
    """Another order of backward changes no bit, and K-FAC sees what it sees without."""
    how = {"schedule": schedule, **({"k": 2} if schedule == "reverse_first" else {})}

    def script(arrange, reorders=True):
        model = mlp()
        optimizer = sgd(model.parameters())
        with contextlib.ExitStack() as stack:
            if reorders and first == "reorder":
                reordering = stack.enter_context(optfuse.reorder(model, **how))
            arranged = arrange(model, optimizer, **SELDOM)
            if reorders and first == "kfac":
                reordering = stack.enter_context(optfuse.reorder(model, **how))
            for i in range(STEPS):
                optimizer.zero_grad()
                mlp_loss(model, i).backward()
                arranged.step()
                if reorders:
                    assert any(row.turn is not None for row in reordering.plan.rows)
        # Without the reordering K-FAC goes on.
        optimizer.zero_grad()
        mlp_loss(model, STEPS).backward()
        arranged.step()
        yield from seen(model, arranged, "0", "4", "8")

    def unordered(arrange):
        return script(arrange, False)

    reference = played(unordered, Second)
    wrap = optfuse.fuse if mode else Stock()
    ours = played(script, lambda m, o, **options: Ours(m, wrap(o), **options))
    for a, b in zip(ours, reference, strict=True):
        assert_close(b[0], a[1], b[1])
    same_bits(unordered, script)


def test_reordering_goes_on_without_kfac():
    torch.manual_seed(0)
    model = mlp()
    optimizer = sgd(model.parameters())
    with optfuse.reorder(model, "last") as reordering:
        ours = Ours(model, optimizer, **OFTEN)
        mlp_loss(model, 0).backward()
        ours.step()
        ours.kfac.remove()
        mlp_loss(model, 1).backward()
        optimizer.step()
        assert all(row.turn is not None for row in reordering.plan.rows)


def test_deterministic_algorithms_and_two_runs_have_the_same_bits():
    torch.use_deterministic_algorithms(True)
    try:
        script = training("conv net", **SELDOM)
        same_bits(script, script)
    finally:
        torch.use_deterministic_algorithms(False)
