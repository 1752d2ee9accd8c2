# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark's models on its data with another order of backward: after 50 steps every loss,
weight and state has stock's bits, in both modes of fusion and without it. A fifth of the 72
cases; tests/run --full plays all of them."""

import itertools

import pytest
from reorder_scripts import MODES, same_reordered
from test_models import (  # noqa: F401
    OPTIMIZERS,
    deterministic,
    gpt,
    mlp,
    mobilenet,
    parts,
    resnet,
    training,
)
from torch import nn

STEPS = 50
CHOICES = ("last", "reverse_first", "budget")
CASES = list(itertools.product((mlp, gpt, resnet, mobilenet), OPTIMIZERS, CHOICES, MODES))
SAMPLE = [
    pytest.param(*case, marks=pytest.mark.full if place % 5 else ())
    for place, case in enumerate(CASES)
]


def choice_of(name, model):
    layers = sum(isinstance(m, nn.Linear | nn.Conv2d) for m in model.modules())
    more = {"last": {}, "reverse_first": {"k": layers // 2}, "budget": {"memory": 1 << 18}}
    return {"schedule": name, **more[name]}


@pytest.mark.slow
@pytest.mark.parametrize(("build", "kind", "choice", "mode"), SAMPLE)
def test_50_steps_have_the_bits_of_stock(build, kind, choice, mode, parts):  # noqa: F811
    model, _ = build(*parts)
    same_reordered(training(build, kind, parts, STEPS), choice_of(choice, model), mode)
