# SPDX-License-Identifier: BSD-3-Clause
"""Adafactor and Muon on a GPU that the CPU plays: their step() is recorded there, or runs as it is,
with its bits and in its order."""

import pytest
import torch
from common import everything
from gpu import NAME
from legal import in_order
from torch.optim import Adafactor, Muon
from tried import DTYPES, MODES

SHAPES = {
    Adafactor: ((), (1,), (1003,), (1, 1), (20, 50), (131, 57), (2, 3, 5)),
    Muon: ((1, 1), (20, 50), (50, 20), (131, 57)),
}
OPTIONS = {
    Adafactor: ({}, {"lr": 0.3, "weight_decay": 0.1, "maximize": True}, {"foreach": True}),
    Muon: ({}, {"lr": 0.1, "nesterov": False, "ns_steps": 3}),
}
CASES = [(cls, options) for cls, some in OPTIONS.items() for options in some]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("cls", "options"), CASES)
@in_order(*MODES, prove=False)
def test_bits_and_order_are_those_of_the_class(wrap, cls, options, dtype):
    torch.manual_seed(1)
    model = torch.nn.Module()
    model.all = torch.nn.ParameterList(torch.randn(shape).to(NAME, dtype) for shape in SHAPES[cls])
    optimizer = wrap(cls(model.parameters(), **options))
    for i in range(5):
        optimizer.zero_grad()
        torch.manual_seed(i)
        factors = [torch.randn(p.shape).to(p.device, p.dtype) for p in model.all]
        sum((p * f).sum() for p, f in zip(model.all, factors, strict=True)).backward()
        optimizer.step()
    yield from everything(model, optimizer)
