# SPDX-License-Identifier: BSD-3-Clause
"""Operators that take functions, which PyTorch dispatches in Python."""

import pytest
import torch
from common import adamw, batch, everything, same, train
from torch import nn


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.a(x).sin(), lambda x: self.b(x).cos(), (x,))


@pytest.mark.parametrize("mode", ("forward", "backward"))
def test_an_exported_condition_trains(mode):
    def script(wrap):
        exported = torch.export.export(Branching(), (batch(0)[0],)).module()
        optimizer = wrap(adamw(exported.parameters()))
        for i in range(5):
            yield "loss", train(exported, optimizer, i)
            wrap.pending()
        yield from everything(exported, optimizer)

    same(script, mode, prove=False)
