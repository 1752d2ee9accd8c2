# SPDX-License-Identifier: BSD-3-Clause
"""optfuse.kfac() in other forms of training: what is counted, and that it is counted once."""

import contextlib

import pytest
import torch
from common import Stock
from kfac_cases import (
    OFTEN,
    SELDOM,
    STEPS,
    Ours,
    Second,
    adamw,
    agree,
    assert_close,
    conv_loss,
    conv_net,
    gpt,
    gpt_loss,
    mlp,
    mlp_loss,
    played,
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
@pytest.mark.parametrize(("build", "loss_of"), [(mlp, mlp_loss), (conv_net, conv_loss)])
def test_accumulation_of_micro_batches(build, loss_of, sizes, mode):
    """Each loss counts as its share of the batch."""

    def script(arrange):
        model = build()
        optimizer = sgd(model.parameters())
        arranged = arrange(model, optimizer, **SELDOM)
        for i in range(STEPS):
            optimizer.zero_grad()
            for part, n in enumerate(sizes):
                (loss_of(model, 3 * i + part, n) * (n / sum(sizes))).backward()
            arranged.step()
        yield from seen(model, arranged, "0", "2")

    agree(script, mode)


def test_micro_batches_are_the_whole_batch():
    def script(parts):
        def whole_or_cut(arrange):
            model = mlp()
            optimizer = adamw(model.parameters())
            arranged = arrange(model, optimizer, **OFTEN)
            for i in range(STEPS):
                optimizer.zero_grad()
                for x in rows(i, 12, 6).split(parts):
                    (model(x).sin().square().mean() * len(x) / 12).backward()
                arranged.step()
            yield from seen(model, arranged, "0", "8")

        return whole_or_cut

    whole = played(script([12]), Ours)
    for parts in ([6, 6], [1, 4, 7]):
        for a, b in zip(played(script(parts), Ours), whole, strict=True):
            assert_close(b[0], a[1], b[1])


def test_forward_passes_before_the_first_backward():
    """The order of the backward passes is another one than that of the forward passes."""

    def script(arrange):
        model = mlp()
        optimizer = sgd(model.parameters())
        arranged = arrange(model, optimizer, **SELDOM)
        for i in range(STEPS):
            optimizer.zero_grad()
            losses = [mlp_loss(model, 3 * i + part, 3 + part) for part in range(3)]
            for loss in (losses[1], losses[2], losses[0]):
                loss.backward()
            arranged.step()
        yield from seen(model, arranged, "0", "8")

    agree(script)


# Checkpointing


@MODES
@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("preserve", (False, True))
def test_checkpointing_counts_once(reentrant, preserve, mode):
    options = {"use_reentrant": reentrant, "preserve_rng_state": preserve}

    def script(arrange, checkpointed=True):
        model = mlp()
        optimizer = sgd(model.parameters())
        arranged = arrange(model, optimizer, **SELDOM)
        for i in range(STEPS):
            optimizer.zero_grad()
            x = rows(i, 7, 6).requires_grad_()
            if checkpointed:
                y = checkpoint(model[:4], x, **options)
                y = checkpoint(model[4:], y, **options)
            else:
                y = model(x)
            y.sin().square().mean().backward()
            arranged.step()
        yield from seen(model, arranged, "0", "4", "8")

    ours, _ = agree(script, mode)
    plain = played(lambda arrange: script(arrange, False), Ours)
    for a, b in zip(ours, plain, strict=True):
        assert_close(b[0], a[1], b[1])


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpoints_within_checkpoints(reentrant):
    def script(arrange):
        model = mlp()
        optimizer = sgd(model.parameters())
        arranged = arrange(model, optimizer, **SELDOM)

        def outer(x):
            return model[6:](checkpoint(model[2:6], model[:2](x), use_reentrant=reentrant))

        for i in range(STEPS):
            optimizer.zero_grad()
            x = rows(i, 7, 6).requires_grad_()
            checkpoint(outer, x, use_reentrant=reentrant).sin().square().mean().backward()
            arranged.step()
        yield from seen(model, arranged, "0", "4", "8")

    agree(script)


def test_a_checkpointed_convolution_before_an_activation_in_place():
    def script(arrange):
        model = conv_net()
        optimizer = sgd(model.parameters())
        arranged = arrange(model, optimizer, **SELDOM)
        for i in range(STEPS):
            optimizer.zero_grad()
            y = checkpoint(model[:5], rows(i, 6, 2, 6, 6), use_reentrant=False)
            model[5:](y).sin().square().mean().backward()
            arranged.step()
        yield from seen(model, arranged, "0", "2", "4", "7")

    agree(script)


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
    def script(arrange):
        model = Tied(bias).double()
        optimizer = sgd(model.parameters())
        arranged = arrange(model, optimizer, **SELDOM)
        for i in range(STEPS):
            optimizer.zero_grad()
            model(rows(i, 5, 6)).sin().square().mean().backward()
            arranged.step()
        yield from seen(model, arranged, "inner", "first")

    agree(script, mode)


def test_a_convolution_that_is_used_twice():
    def script(arrange):
        model = nn.Conv2d(2, 2, 3, padding=1).double()
        optimizer = sgd(model.parameters())
        arranged = arrange(model, optimizer, **SELDOM)
        for i in range(STEPS):
            optimizer.zero_grad()
            x = rows(i, 4, 2, 5, 5)
            model(torch.relu_(model(x))).sin().square().mean().backward()
            arranged.step()
        yield from seen(model, arranged, "")

    agree(script)


def test_the_number_of_uses_may_change():
    def script(arrange):
        model = mlp(width=6, layers=1)
        optimizer = sgd(model.parameters())
        arranged = arrange(model, optimizer, **OFTEN)
        for i in range(STEPS):
            optimizer.zero_grad()
            x = rows(i, 5, 6)
            for _ in range(i % 3):
                x = torch.tanh(model[0](x))
            model(x).sin().square().mean().backward()
            arranged.step()
        yield from seen(model, arranged, "0", "2")

    agree(script)


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


@MODES
@pytest.mark.parametrize("unseen", ("none", "product"))
def test_missing_layers_may_be_left_as_they_are(unseen, mode):
    def script(arrange):
        model = Forked().double()
        optimizer = sgd(model.parameters())
        arranged = arrange(model, optimizer, **OFTEN, missing="skip")
        for i in range(STEPS):
            optimizer.zero_grad()
            how = "module" if i % 3 == 0 else unseen
            model(rows(i, 5, 6), how).sin().square().mean().backward()
            if unseen == "product":
                before = model.other.weight.grad.clone()
            arranged.step()
            if unseen == "product":
                untouched = torch.equal(model.other.weight.grad, before)
                assert untouched == (how == "product"), f"step {i}"
        yield from seen(model, arranged, "first", "other", "head")

    agree(script, mode)


def test_a_layer_may_be_missing_between_two_factor_steps():
    def script(arrange):
        model = Forked().double()
        optimizer = sgd(model.parameters())
        arranged = arrange(model, optimizer, **SELDOM)
        for i in range(STEPS):
            optimizer.zero_grad()
            how = "module" if i % 2 == 0 else "none"
            model(rows(i, 5, 6), how).sin().square().mean().backward()
            arranged.step()
        yield from seen(model, arranged, "first", "other", "head")

    agree(script)


# Passes that are not meant


def test_evaluation_is_not_counted():
    def script(arrange, evaluates=True):
        model = gpt()
        optimizer = sgd(model.parameters())
        arranged = arrange(model, optimizer, **SELDOM)
        for i in range(STEPS):
            optimizer.zero_grad()
            loss = gpt_loss(model, i)
            if evaluates:
                with torch.no_grad() if i % 2 else torch.inference_mode():
                    gpt_loss(model.eval(), 100 + i)
                model.train()
            loss.backward()
            if evaluates:
                with torch.no_grad():
                    gpt_loss(model, 200 + i)
            arranged.step()
        yield from seen(model, arranged, "head", "blocks.0.qkv")

    agree(script)
    same_bits(script, lambda arrange: script(arrange, False))


@pytest.mark.parametrize("what", ("backward", "forward", "both"))
def test_discarded_passes_are_not_counted(what):
    def script(arrange, looks=True):
        model = mlp()
        optimizer = sgd(model.parameters())
        arranged = arrange(model, optimizer, **SELDOM)
        for i in range(STEPS):
            if looks:
                loss = mlp_loss(model, 100 + i)
                if what != "forward":
                    loss.backward()
                if what != "backward":
                    mlp_loss(model, 200 + i)
                arranged.discard()
            optimizer.zero_grad()
            mlp_loss(model, i).backward()
            arranged.step()
        yield from seen(model, arranged, "0", "8")

    agree(script)
    same_bits(script, lambda arrange: script(arrange, False))


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
