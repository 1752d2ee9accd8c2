# SPDX-License-Identifier: BSD-3-Clause
"""Layers are traced with symbolic sizes (torch.export, torch.compile with dynamic shapes) also
where the gradients of other layers in the process may be promises."""

import pytest
import torch
from common import adamw, same
from torch import nn
from torch.export import Dim, export

import optfuse


@pytest.fixture(autouse=True)
def promising():
    """A layer that is wide enough."""
    wide = nn.Linear(1024, 1024)
    optimizer = optfuse.fuse(adamw(wide.parameters()))
    assert optfuse.summary(optimizer).promised
    yield
    optfuse.unfuse(optimizer)


@pytest.mark.parametrize(
    ("layer", "sizes"), [(nn.Linear(6, 3), (5, 6)), (nn.Conv2d(3, 4, 3), (2, 3, 8, 8))], ids=str
)
def test_export_with_a_dynamic_batch(layer, sizes):
    x = torch.randn(sizes)
    exported = export(layer, (x,), dynamic_shapes=({0: Dim("batch")},)).module()
    assert torch.equal(exported(x), layer(x))


@pytest.mark.parametrize("mode", ("forward", "backward"))
def test_a_compiled_model_with_batches_of_several_sizes(mode):
    def script(wrap):
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = wrap(adamw(model.parameters()))
        compiled = torch.compile(model, backend="aot_eager", dynamic=True)
        for i in range(4):
            optimizer.zero_grad()
            loss = compiled(torch.linspace(-1, 1, (i + 3) * 6).view(-1, 6)).square().mean()
            loss.backward()
            optimizer.step()
            yield "loss", loss
            del loss
        yield "parameters", list(model.parameters())

    same(script, mode, prove=False)
