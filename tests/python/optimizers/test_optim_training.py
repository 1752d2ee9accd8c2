# SPDX-License-Identifier: BSD-3-Clause
"""200 steps of two small nets with every optimizer that fuses, in both modes:
each loss, and all weights and states at the end, have the bits of the
reference. Nothing is replayed here: a bit that differs once changes the loss."""

import pytest
import torch
from common import Fused, Stock, assert_same, run
from optim_classes import CLASSES, build
from optim_entries import ENTRIES
from torch import nn
from torch.nn.functional import cross_entropy

STEPS = 200
CLASS_COUNT = 4
#: Where 0.01 does not suit a class.
RATES = {name: entry.rate for name, entry in ENTRIES.items()} | {"Adam": 3e-3, "AdamW": 3e-3}


class ConvNet(nn.Module):
    """Convolutions with batch norm on images of 8 x 8; 8 batches over and over."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.other = nn.Conv2d(6, 7, 3, stride=2, bias=False), nn.BatchNorm2d(7)
        self.head = nn.Linear(7, CLASS_COUNT)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        return self.head(self.other(self.second(x)).relu().mean((2, 3)))

    @staticmethod
    def batch(i):
        generator = torch.Generator().manual_seed(i % 8)
        y = torch.randint(CLASS_COUNT, (4,), generator=generator)
        x = torch.randn(4, 1, 8, 8, generator=generator)
        return x + y.view(-1, 1, 1, 1), y


class Transformer(nn.Module):
    """One block of width 16 with its embedding tied to the head."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 16), nn.Parameter(torch.zeros(7, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True)

    def forward(self, x):
        return self.block(self.embed(x) + self.place) @ self.embed.weight.t()

    @staticmethod
    def batch(i):
        x = (torch.arange(8) * (1 + i % 3) + torch.arange(3).view(-1, 1)) % 11
        return x[:, :-1], x[:, 1:]


def trained_by(optimizer, model):
    """Shapes that this class takes; the rest stays as it is. Muon takes matrices only."""
    if optimizer.__name__ != "Muon":
        return list(model.parameters())
    return [p for p in model.parameters() if p.dim() == 2]


def training(kind, cls):
    def script(wrap):
        model = kind()
        params = trained_by(cls, model)
        optimizer = wrap(build(cls, params, lr=RATES.get(cls.__name__, 0.01)))
        for i in range(STEPS):
            x, y = kind.batch(i)
            optimizer.zero_grad()
            loss = cross_entropy(model(x).flatten(0, -2), y.flatten())
            loss.backward()
            optimizer.step()
            yield "loss", loss
        yield "weights", dict(model.state_dict())
        yield "state", optimizer.state_dict()

    return script


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("kind", (ConvNet, Transformer))
def test_200_steps_have_the_bits_of_the_reference(kind, cls):
    script = training(kind, cls)
    stock = run(script, Stock())
    losses = [loss.item() for name, loss in stock if name == "loss"]
    assert sum(losses[-20:]) < sum(losses[:20]), "the model learns nothing: a poor example"
    for mode in ("forward", "backward"):
        wrap = Fused(mode)
        for step, (a, b) in enumerate(zip(run(script, wrap), stock, strict=True)):
            assert_same(f"{mode} fusion, step {step + 1}, {b[0]}", a[1], b[1])
        wrap.prove()
