# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark's models on its data: 200 steps, and every loss, weight and
state has the bits of stock's fused=True, in both modes. The models are smaller
and see less at once than in the benchmark; their layers are the same."""

import sys
from pathlib import Path

import pytest
import torch
from common import Fused, Stock, assert_same, run
from torch.nn.functional import cross_entropy

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
STEPS = 200
SIZE, LENGTH = 32, 16


@pytest.fixture(scope="module")
def parts():
    """The benchmark's models and data."""
    pytest.importorskip("sklearn", reason="the handwritten digits come with scikit-learn")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import data
        import models

        yield models, data
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(autouse=True)
def deterministic(one_thread):
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def mobilenet(models, data):
    model = models.MobileNetV2(10)
    model.features = model.features[:11]  # the widest layers only take time
    model.head = torch.nn.Linear(channels_after(model.features), 10)
    return model, data.digit_batches(2, SIZE, 3)


def resnet(models, data):
    model = models.ResNet18(10)
    model.features = model.features[:-4]
    model.head = torch.nn.Linear(channels_after(model.features), 10)
    return model, data.digit_batches(2, SIZE, 3)


def channels_after(features):
    with torch.no_grad():
        return features.eval()(torch.zeros(1, 3, SIZE, SIZE)).shape[1]


def gpt(models, data):
    vocabulary = len(data.text()[1])
    model = models.GPT(vocabulary, LENGTH, width=64, layers=3, heads=4)
    return model, data.text_batches(2, LENGTH)


def mlp(models, data):
    return models.MLP(width=96), data.digit_batches(8, 8, 1)


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-4, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=3e-3, momentum=0.9, fused=True),
}


def training(build, kind, parts, steps=STEPS):
    def script(wrap, arrange=lambda model: None):
        model, batches = build(*parts)
        model.train()
        arrange(model)
        optimizer = wrap(OPTIMIZERS[kind](model.parameters()))
        for _ in range(steps):
            x, y = next(batches)
            optimizer.zero_grad()
            loss = cross_entropy(model(x).flatten(0, -2), y.flatten())
            loss.backward()
            optimizer.step()
            yield "loss", loss
        yield "weights", dict(model.state_dict())
        yield "state", optimizer.state_dict()["state"]

    return script


CASES = [(mlp, "AdamW"), (mlp, "SGD"), (gpt, "AdamW"), (gpt, "SGD")]
CASES += [(resnet, "AdamW"), (resnet, "SGD"), (mobilenet, "AdamW")]


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        pytest.param(*case, marks=pytest.mark.full if case == (resnet, "SGD") else ())
        for case in CASES
    ],
)
def test_200_steps_have_the_bits_of_stock(build, kind, parts):
    script = training(build, kind, parts)
    stock = run(script, Stock())
    losses = [float(loss) for name, loss in stock if name == "loss"]
    assert sum(losses[-20:]) < sum(losses[:20]), "the model learns nothing: a poor example"
    for mode in ("forward", "backward"):
        wrap = Fused(mode)
        ours = run(script, wrap)
        for step, (a, b) in enumerate(zip(ours, stock, strict=True)):
            assert_same(f"{mode} fusion, step {step + 1}, {b[0]}", a[1], b[1])
        wrap.prove()
