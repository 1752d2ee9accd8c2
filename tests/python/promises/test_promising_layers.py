# SPDX-License-Identifier: BSD-3-Clause
"""Layers whose gradients are promised, and those that are left alone."""

import pytest
import torch
from common import adamw
from torch import nn

import optfuse
from promises.counted import promises_of, total
from promises.scripted import WIDTH, batch, train, wide


def test_small_or_thick_layers_are_left_alone(monkeypatch):
    monkeypatch.setenv("OPTFUSE_PRODUCTS", "auto")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
    optimizer = optfuse.fuse(adamw(model.parameters()))
    assert promises_of(optimizer) == ()
    thick = nn.Linear(600, 600)
    optimizer = optfuse.fuse(adamw(thick.parameters()))
    for rows, asked in ((600, 0), (8, 1)):
        thick(torch.randn(rows, 600)).sum().backward()
        assert [layer.promised + layer.whole for layer in promises_of(optimizer)] == [asked]


@pytest.mark.parametrize("make", (torch.optim.Adafactor, torch.optim.Muon))
def test_rules_without_kernels_have_none(make):
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = optfuse.fuse(make(model.parameters(), lr=1e-3))
    assert promises_of(optimizer) == ()


def test_a_layer_whose_gradient_is_looked_at_stops(monkeypatch):
    monkeypatch.setenv("OPTFUSE_PRODUCTS", "auto")
    model = nn.Linear(600, 600)
    optimizer = optfuse.fuse(adamw(model.parameters()))
    for _ in range(400):
        optimizer.zero_grad()
        model(torch.randn(4, 600)).square().mean().backward()
        model.weight.grad.norm()
        optimizer.step()
    (layer,) = promises_of(optimizer)
    assert layer.made <= 10 and layer.made + layer.whole == 400
    if layer.made:
        assert "looked at" in optfuse.explain(optimizer)


def test_auto_is_the_default(monkeypatch):
    monkeypatch.delenv("OPTFUSE_PRODUCTS")
    model = nn.Linear(600, 600)
    optimizer = optfuse.fuse(adamw(model.parameters()))
    assert len(promises_of(optimizer)) == 1
    optfuse.unfuse(optimizer)
    for off in ({"products": "off"}, {}):
        optimizer = optfuse.fuse(optimizer, **off)
        assert promises_of(optimizer) == ()
        optfuse.unfuse(optimizer)
        monkeypatch.setenv("OPTFUSE_PRODUCTS", "off")
    monkeypatch.setenv("OPTFUSE_PRODUCTS", "maybe")
    with pytest.raises(optfuse.Error, match="OPTFUSE_PRODUCTS=maybe"):
        optfuse.fuse(optimizer)


def test_flush_leaves_a_gradient_a_promise():
    """It has been used up by then, or is none of flush()'s business."""
    model = wide()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    for i in range(4):
        train(model, optimizer, i)
        optfuse.flush(optimizer if i % 2 else None)
    assert total(optimizer, "panels") == total(optimizer, "promised") == 12
    assert total(optimizer, "made") == 0


def test_after_unfuse_gradients_are_computed():
    model = wide()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    for is_fused in (True, False):
        model(batch(0)).sum().backward()
        marked = "GenericWrapper" in str(torch._C._dispatch_keys(model[0].weight.grad))
        assert marked == is_fused
        optimizer.zero_grad()
        if is_fused:
            optfuse.unfuse(optimizer)
