# SPDX-License-Identifier: BSD-3-Clause
"""Operators that take functions, which PyTorch dispatches in Python."""

import pytest
import torch
from common import adamw, batch, everything, same, train
from torch import nn

both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.a(x).sin(), lambda x: self.b(x).cos(), (x,))


@both_modes
def test_an_exported_condition_trains(mode):
    def script(wrap):
        exported = torch.export.export(Branching(), (batch(0)[0],)).module()
        optimizer = wrap(adamw(exported.parameters()))
        for i in range(5):
            yield "loss", train(exported, optimizer, i)
            wrap.pending()
        yield from everything(exported, optimizer)

    same(script, mode, prove=False)


@both_modes
def test_a_condition_over_parameters(mode):
    """By the operator itself, while updates are pending."""

    def script(wrap):
        model = nn.Linear(6, 3)
        optimizer = wrap(adamw(model.parameters()))
        for i in range(3):
            train(model, optimizer, i)
            wrap.pending()
            with torch.no_grad():
                operands = (model.weight, model.bias)
                yield (
                    "sum",
                    torch.ops.higher_order.cond(
                        torch.tensor(i > 0),
                        lambda w, b: (w.sum() + b,),
                        lambda w, b: (w.sum() - b,),
                        operands,
                    ),
                )
                del operands

    same(script, mode)
