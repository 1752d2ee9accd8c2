# SPDX-License-Identifier: BSD-3-Clause
"""The attributes of a KFAC, its checkpoints, and that it leaves nothing behind."""

import copy
import gc
import weakref

import pytest
import torch
from common import Fused, Stock, assert_same, refused, snapshot
from kfac_cases import (
    MODELS,
    OFTEN,
    SELDOM,
    STEPS,
    Ours,
    adamw,
    agree,
    conv_net,
    labels,
    mlp,
    mlp_loss,
    rows,
    seen,
    sgd,
    through_a_file,
)
from torch import nn

import optfuse

# Resuming


def started(model, make, mode, **options):
    torch.manual_seed(0)
    build, _, _ = MODELS[model]
    model = build()
    wrap = Fused(mode) if mode else Stock()
    optimizer = wrap(make(model.parameters()))
    return model, optimizer, Ours(model, optimizer, **options)


def train(model, optimizer, ours, loss_of, steps):
    for i in steps:
        optimizer.zero_grad()
        loss_of(model, i).backward()
        ours.step()


@pytest.mark.parametrize("mode", (None, "forward"), ids=("stock", "fused"))
@pytest.mark.parametrize("saved", range(8))
@pytest.mark.parametrize("name", ("mlp", "conv net"))
def test_resuming_has_the_bits_of_training_on(name, saved, mode):
    """After any step: the inverses may be older than the factors, and factors_every and
    inverses_every count from the first step of all."""
    loss_of, names = MODELS[name][1:]
    options = {"factors_every": 2, "inverses_every": 5, "decay": 0.5, "split": "pi"}
    options["damping"] = lambda t: 0.1 / (1 + t)
    first = started(name, adamw, mode, **options)
    train(*first, loss_of, range(saved))
    state = through_a_file([part.state_dict() for part in (*first[:2], first[2].kfac)])
    train(*first, loss_of, range(saved, STEPS))

    second = started(name, adamw, mode, **options)
    train(*second, loss_of, range(3))  # which is forgotten
    for part, found in zip((*second[:2], second[2].kfac), state, strict=True):
        part.load_state_dict(found)
    train(*second, loss_of, range(saved, STEPS))
    for a, b in zip(
        seen(second[0], second[2], *names), seen(first[0], first[2], *names), strict=True
    ):
        assert_same(b[0], a[1], b[1])


def test_a_state_does_not_change_with_further_training():
    model, optimizer, ours = started("mlp", sgd, None, **OFTEN)
    train(model, optimizer, ours, mlp_loss, range(3))
    state = ours.kfac.state_dict()
    before = snapshot(state)
    train(model, optimizer, ours, mlp_loss, range(3, 6))
    assert_same("the state", state, before)
    factors = snapshot(ours.factors("0"))
    ours.kfac.load_state_dict(state)
    train(model, optimizer, ours, mlp_loss, range(6, 8))
    assert_same("the state that was loaded", state, before)
    assert not torch.equal(ours.factors("0")[0], factors[0])


def test_packed_factors_are_half_of_the_full_ones():
    model, optimizer, ours = started("mlp", sgd, None, **OFTEN)
    train(model, optimizer, ours, mlp_loss, range(1))

    def elements(value):
        if isinstance(value, torch.Tensor):
            return value.numel()
        items = value.values() if isinstance(value, dict) else value
        return sum(map(elements, items)) if isinstance(value, dict | list | tuple) else 0

    orders = [len(f) for name in MODELS["mlp"][2] for f in ours.factors(name)]
    # Factors, and at most the inverses that were made of them, with a few numbers beside.
    packed = sum(d * (d + 1) // 2 for d in orders)
    assert packed <= elements(ours.kfac.state_dict()) <= 2 * packed + 8 * len(orders)


def other_width():
    return mlp(width=9)


def another_layer():
    return mlp(layers=4)


@pytest.mark.parametrize("build", (other_width, another_layer, conv_net))
def test_the_state_of_another_model_is_refused(build):
    model, optimizer, ours = started("mlp", sgd, None, **OFTEN)
    train(model, optimizer, ours, mlp_loss, range(2))
    other = build()
    theirs = Ours(other, sgd(other.parameters()), **OFTEN)
    before = snapshot(theirs.factors("0"))
    refused(lambda: theirs.kfac.load_state_dict(ours.kfac.state_dict()), way_out="optfuse")
    assert_same("factors after the refusal", theirs.factors("0"), before)


@pytest.mark.parametrize("state", ({}, {"step": 1}, []))
def test_what_is_no_state_is_refused(state):
    _, _, ours = started("mlp", sgd, None)
    refused(lambda: ours.kfac.load_state_dict(state), way_out="state")


def test_a_copy_of_the_model_is_on_its_own():
    """A copy by deepcopy() has no K-FAC, and training it changes no factor."""
    model, optimizer, ours = started("mlp", sgd, None, **OFTEN)
    train(model, optimizer, ours, mlp_loss, range(2))
    before = snapshot(ours.factors("0"))
    twin = copy.deepcopy(model)
    mlp_loss(twin, 3).backward()
    gradient = twin[0].weight.grad.clone()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert torch.equal(gradient, twin[0].weight.grad)
    assert_same("factors", ours.factors("0"), before)


# The end


def hooks_of(model, optimizer):
    modules = list(model.modules())
    found = [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)]
    for m in modules:
        found += [len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)]
    return found


@pytest.mark.parametrize("mode", (None, "forward"), ids=("stock", "fused"))
@pytest.mark.parametrize("when", ("at once", "after steps", "between backward and step"))
def test_after_remove_training_is_stocks(when, mode):
    torch.manual_seed(0)
    model = conv_net()
    loss_of = MODELS["conv net"][1]
    wrap = Fused(mode) if mode else Stock()
    optimizer = wrap(sgd(model.parameters()))
    before = hooks_of(model, optimizer)
    ours = Ours(model, optimizer, **OFTEN)
    if when != "at once":
        train(model, optimizer, ours, loss_of, range(3))
    if when == "between backward and step":
        optimizer.zero_grad()
        loss_of(model, 3).backward()
    weights, state = snapshot(dict(model.state_dict())), copy.deepcopy(optimizer.state_dict())
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    ours.kfac.remove()
    ours.kfac.remove()
    assert hooks_of(model, optimizer) == before
    stock = conv_net()
    stock.load_state_dict(weights)
    stock_optimizer = sgd(stock.parameters())
    stock_optimizer.load_state_dict(state)
    for p, gradient in zip(stock.parameters(), gradients, strict=True):
        p.grad = gradient
    for i in range(4):
        for m, o in ((model, optimizer), (stock, stock_optimizer)):
            if i > 0:
                o.zero_grad()
                loss_of(m, 10 + i).backward()
            if i > 0 or when == "between backward and step":
                o.step()
    assert_same("weights", dict(model.state_dict()), dict(stock.state_dict()))
    y = model[0](rows(0, 1, 2, 6, 6))
    assert y.grad_fn.name() == "ConvolutionBackward0", "the tap is still there"


def test_a_removed_one_says_so():
    _, _, ours = started("mlp", sgd, None)
    ours.kfac.remove()
    for call in (lambda: ours.factors("0"), ours.kfac.state_dict):
        refused(call, way_out="removed")


def test_a_second_one_may_follow_the_first():
    def script(arrange):
        model = mlp()
        optimizer = sgd(model.parameters())
        arranged = arrange(model, optimizer, **SELDOM)
        if arranged.is_ours:
            arranged.kfac.remove()
            arranged = arrange(model, optimizer, **SELDOM)
        train(model, optimizer, arranged, mlp_loss, range(STEPS))
        yield from seen(model, arranged, "0", "8")

    agree(script)


def test_it_keeps_no_model_alive():
    model, optimizer, ours = started("mlp", sgd, None, **OFTEN)
    train(model, optimizer, ours, mlp_loss, range(2))
    weight = weakref.ref(model[0].weight)
    del model, optimizer, ours
    gc.collect()
    assert weight() is None


def test_it_keeps_nothing_of_a_pass_after_its_step():
    model, optimizer, ours = started("mlp", sgd, None, **OFTEN)
    for i in range(3):
        x = rows(i, 7, 6)
        alive = weakref.ref(x)
        optimizer.zero_grad()
        y = model(x)
        y.sum().backward()
        ours.step()
        del x, y
        assert alive() is None


# The summary


class Mixed(nn.Module):
    """One layer of every kind."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 8)
        self.norm = nn.LayerNorm(8)
        self.inner, self.left_out, self.frozen = (nn.Linear(8, 8) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv, self.grouped = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2)
        self.batch = nn.BatchNorm2d(4)
        self.depth = nn.Conv1d(4, 4, 2)

    def forward(self, words):
        x = self.norm(self.words(words))
        x = x + self.attend(x, x, x, need_weights=False)[0]
        x = self.frozen(self.left_out(torch.relu_(self.inner(x))))
        y = self.batch(self.grouped(torch.relu_(self.conv(x[:, None]))))
        return self.depth(y.flatten(2))


LEFT = {
    "words": "Embedding",
    "left_out": "skip",
    "frozen": "",
    "grouped": "groups",
    "norm": "LayerNorm",
    "batch": "BatchNorm",
    "depth": "Conv1d",
}
TAKEN = ("inner", "conv", "attend.in_proj_weight", "attend.out_proj")


def mixed_loss(model, i):
    return model(labels(i, 9, 4, 6)).sin().square().mean()


def line_of(text, name):
    lines = [line for line in text.splitlines() if name in line.split()]
    assert len(lines) == 1, f"{name} has {len(lines)} lines in\n{text}"
    return lines[0]


def test_the_summary_names_every_layer():
    torch.manual_seed(0)
    model = Mixed().double()
    parameters = [p for p in model.parameters() if p.requires_grad]
    ours = Ours(model, sgd(parameters), skip=("left_out",))
    text = str(ours.kfac.summary())
    for name, why in LEFT.items():
        line = line_of(text, name)
        assert why in line, f"{why!r} is not in {line!r}"
        with pytest.raises(optfuse.Error, match=name):
            ours.factors(name)
    taken = {name: line_of(text, name) for name in TAKEN}
    for name, line in taken.items():
        ours.factors(name)
        assert not any(why and why in line for why in LEFT.values()), line


def test_layers_that_are_left_train_as_the_optimizer_has_them():
    """Conv2d with groups, Embedding, norms and Conv1d: their gradients are not touched."""

    def script(arrange):
        model = Mixed().double()
        optimizer = sgd(p for p in model.parameters() if p.requires_grad)
        arranged = arrange(model, optimizer, **SELDOM, skip=("left_out",))
        for i in range(STEPS):
            optimizer.zero_grad()
            mixed_loss(model, i).backward()
            before = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
            arranged.step()
            for name, p in model.named_parameters():
                left = name.split(".")[0] in LEFT
                if name in before:
                    assert torch.equal(p.grad, before[name]) == left, f"{name}, step {i}"
        yield from seen(model, arranged, *TAKEN)

    agree(script)
    agree(script, "forward")


def test_factors_by_a_name_that_does_not_exist():
    _, _, ours = started("mlp", sgd, None)
    refused(lambda: ours.factors("1"), "'1'", way_out="layer")
