# SPDX-License-Identifier: BSD-3-Clause
"""optfuse.kfac() trains as the reference does: within 1e-9 in float64, after 12 steps, whatever
the model, the optimizer and the options."""

import pytest
import torch
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
    mean_of,
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

from optfuse_layers.kfac.factors import Factors

MODES = pytest.mark.parametrize("mode", (None, "forward"), ids=("stock", "fused"))
OPTIONS = {
    "defaults": {},
    "each step": OFTEN,
    "seldom": SELDOM,
    "no clip": {**SELDOM, "kl_clip": None},
    "tight clip": {**SELDOM, "kl_clip": 1e-6},
    "pi": {**OFTEN, "split": "pi"},
    "pi, seldom": {**SELDOM, "split": "pi", "kl_clip": None},
    "much damping": {**OFTEN, "damping": 3.0},
    "no decay": {**OFTEN, "decay": 0.0, "damping": 0.1},
    "much decay": {**OFTEN, "decay": 0.99},
    "skip": {**OFTEN, "skip": ("2", "8")},
    "damping by step": {**OFTEN, "damping": lambda t: 0.1 / (1 + t)},
    "factors by step": {"factors_every": lambda t: 1 if t < 4 else 3, "inverses_every": 2},
    "inverses by step": {"factors_every": 1, "inverses_every": lambda t: 1 + t // 3},
}


@MODES
@pytest.mark.parametrize("make", (sgd, adamw))
@pytest.mark.parametrize("model", MODELS)
def test_models(model, make, mode):
    agree(training(model, make, **SELDOM), mode)


@pytest.mark.parametrize("options", OPTIONS)
def test_options(options):
    agree(training("mlp", **OPTIONS[options]))


@pytest.mark.parametrize("options", ("each step", "no clip", "pi", "tight clip"))
def test_options_with_convolutions(options):
    agree(training("conv net", **OPTIONS[options]))


@pytest.mark.parametrize("options", ("defaults", "seldom", "pi", "damping by step"))
@pytest.mark.parametrize("make", (sgd, adamw))
@pytest.mark.parametrize("model", ("mlp", "conv net", "gpt"))
def test_fused_in_forward_mode_has_the_bits_of_stock(model, make, options):
    same_bits(training(model, make, **OPTIONS[options]), "forward")


def test_the_factors_follow_each_step():
    def look(model, arranged, i):
        yield "factors", [f.clone() for f in arranged.factors("2")]
        yield "gradient", model[2].weight.grad

    ours, _ = agree(training(after_step=look, factors_every=3, inverses_every=2))
    factors = [value for name, value in ours if name == "factors"]
    for t in range(1, STEPS):
        changed = not torch.equal(factors[t][0], factors[t - 1][0])
        assert changed == (t % 3 == 0), f"step {t}"
        for f in factors[t]:
            assert torch.equal(f, f.T), "a factor is symmetric, to the bit"


def test_the_clip_matters_in_these_tests():
    """Or a clip that does nothing would pass, and so would one that is always active."""

    def clips(model, options):
        found = []

        def arrange(*args, **options):
            found.append(Second(*args, **options))
            return found[-1]

        played(training(model, **options), arrange)
        return found[0].clips

    found = {model: clips(model, SELDOM) for model in MODELS}
    assert all(any(nu < 1 for nu in one) for one in found.values()), f"{found}"
    assert any(nu == 1 for one in found.values() for nu in one), f"{found}"
    assert all(nu == 1 for nu in clips("mlp", OPTIONS["no clip"]))


def test_groups_of_parameters_with_rates_of_their_own():
    def make(parameters):
        biases, weights = ([p for p in parameters if p.dim() == n] for n in (1, 2))
        groups = [
            {"params": weights[:2], "lr": 0.1, "weight_decay": 0.1},
            {"params": weights[2:]},
            {"params": biases, "lr": 0.3},
        ]
        return torch.optim.SGD(groups, lr=0.02, momentum=0.9)

    def halve(model, arranged, i):
        for group in arranged.optimizer.param_groups if i % 3 == 2 else ():
            group["lr"] *= 0.5
        return ()

    agree(training("mlp", make, after_step=halve, kl_clip=1e-4, **SELDOM))


class Shapes(nn.Module):
    """Every number of dimensions that a layer may be given."""

    def __init__(self):
        super().__init__()
        self.row, self.grid = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.image, self.images = nn.Conv2d(4, 3, 2), nn.Conv2d(3, 2, (1, 2), padding=(0, 1))

    def forward(self, x):
        y = torch.stack([self.row(one) for one in x.flatten(0, 2)]).view_as(x)  # of one dimension
        y = torch.tanh(self.grid(y))  # of four
        one = self.image(y[0].permute(2, 0, 1))  # of three
        return self.images(torch.relu_(one)[None]).square().mean() + y.square().mean()


@MODES
def test_layers_take_inputs_of_any_dimensions(mode):
    names = ("row", "grid", "image", "images")
    script = training(
        lambda: Shapes().double(), loss=lambda m, i: m(rows(i, 2, 3, 4, 4)), names=names, **OFTEN
    )
    agree(script, mode)


def test_padding_modes_and_inputs_that_are_not_contiguous():
    def build():
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"),
            nn.ReLU(),
            nn.Conv2d(4, 3, 3, padding=(2, 1), padding_mode="reflect", bias=False),
        ).double()

    def loss(model, i):
        return mean_of(model(rows(i, 3, 6, 5, 2).permute(0, 3, 2, 1)))

    agree(training(build, loss=loss, names=("0", "2"), **OFTEN))


@pytest.mark.parametrize("part", ("weight", "bias"))
def test_what_needs_no_gradient(part):
    """Without a weight's gradient a layer is left to the optimizer; a frozen bias is no column."""

    def build():
        model = mlp()
        getattr(model[2], part).requires_grad_(False)
        return model

    names = ("0", *(["2"] if part == "bias" else []))
    ours, _ = agree(training(build, loss=mlp_loss, names=names, **SELDOM))
    if part == "bias":
        assert dict(ours)["factors of '2'"][0].shape == (8, 8)


def test_float32():
    """Rounding of float32 in the inverses, of condition numbers about 1e3."""
    names = MODELS["mlp"][2]

    def look(model, arranged, i):
        if i == 0:
            yield "first factors", [arranged.factors(name) for name in names]

    script = training(
        lambda: mlp().float(), sgd, mlp_loss, names, after_step=look, **OFTEN, damping=1e-2
    )
    ours, reference = (dict(run) for run in agree(script, tolerance=1e-4))
    assert_close("first factors", ours["first factors"], reference["first factors"], 1e-6)
    assert ours["first factors"][0][0].dtype == torch.float32


def test_two_models_have_factors_of_their_own():
    def script(arrange):
        models = [mlp(), mlp()]
        optimizers = [sgd(model.parameters()) for model in models]
        both = [arrange(*pair, **SELDOM) for pair in zip(models, optimizers, strict=True)]
        for i in range(STEPS):
            for j, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                mlp_loss(model, 100 * j + i).backward()
            for arranged in both:
                arranged.step()
        for model, arranged in zip(models, both, strict=True):
            yield from seen(model, arranged, "0", "8")

    agree(script)
    same_bits(script, "forward")


def test_the_optimizers_step_stays_its_own():
    """Gradients are what was preconditioned when it steps: SGD moves by lr times them."""
    torch.manual_seed(0)
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    arranged = Ours(model, optimizer)
    mlp_loss(model, 0).backward()
    arranged.step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.detach(), old.add(p.grad, alpha=-0.5))


class Timed:
    """The part of Factors that takes the times of collections, for one process."""

    collections, _complete = 1, None
    take = Factors._take_times

    def _plan_messages(self, group, complete):
        self.planned = complete


def test_messages_are_planned_by_the_shortest_times_of_what_was_used():
    factors = Timed()
    for complete, used in (
        ([10.0, 12.0, 0.0, 0.0], [True, True, False, False]),
        ([20.0, 0.0, 25.0, 0.0], [True, False, True, False]),
        ([30.0, 33.0, 36.0, 0.0], [True, True, True, False]),
    ):
        factors.collections += 1
        factors.take(None, torch.tensor(used), torch.tensor(complete))
    assert factors.planned == [0.0, 2.0, 5.0, 0.0]
