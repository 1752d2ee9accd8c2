# SPDX-License-Identifier: BSD-3-Clause
"""Backward mode: a gradient in memory that others know, as a part of one flat buffer, is
left to step(). Whoever writes to that memory before step() is obeyed, as in stock."""

import pytest
import torch
from common import adamw, loss_of, net
from torch import nn

import optfuse

STEPS = 4


def hidden_of(model, x):
    hidden, _ = model(x)
    return hidden


MODELS = {
    "linear": lambda: (net(), lambda model: loss_of(model, 0)),
    "convolution": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 3)),
        lambda model: model(torch.ones(2, 3, 6, 6)).square().sum(),
    ),
    "recurrent": lambda: (
        nn.LSTM(6, 8),
        lambda model: hidden_of(model, torch.ones(3, 2, 6)).square().sum(),
    ),
    "attention": lambda: (
        nn.TransformerEncoderLayer(8, 2, 16),
        lambda model: model(torch.ones(3, 2, 8)).pow(3).sum(),
    ),
    "used twice": lambda: (
        nn.Linear(6, 6),
        lambda model: model(model(torch.ones(2, 6)).tanh()).square().sum(),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_of_layers_are_their_own(name):
    """So that their updates run inside backward."""
    model, loss = MODELS[name]()
    optimizer = optfuse.fuse(adamw(model.parameters()), mode="backward")
    for i in range(STEPS):
        optimizer.zero_grad()
        loss(model).backward()
        created = optfuse.summary(optimizer).created
        assert created == (i + 1) * len(list(model.parameters()))
        optimizer.step()
