# SPDX-License-Identifier: BSD-3-Clause
"""A checkpoint gives back by position what its recomputation saves. Whoever stands behind a layer,
stock's node or ours, may come or go between the forward pass and that."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import optfuse


class Checkpointed(nn.Module):
    """Square layers, whose weight could be taken for its transposed one, wide enough that their
    gradients are promises."""

    def __init__(self, width=1024):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.block = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x):
        return checkpoint(self.block, self.first(x), use_reentrant=False)


def gradients(dims, before=None, between=None):
    torch.manual_seed(0)
    model = Checkpointed()
    held = before(model) if before else None
    loss = model(torch.randn(dims)).square().mean()
    if between:
        held = between(model, held)
    loss.backward()
    optfuse.flush()
    return [p.grad.clone() for p in model.parameters()], held


def fused(model, *_):
    return optfuse.fuse(torch.optim.SGD(model.parameters(), lr=0.1))


def reordered(model, *_):
    return optfuse.reorder(model, "last")


def let_die(model, held):
    del held
    gc.collect()


COMES_OR_GOES = {
    "fuse": (None, fused),
    "unfuse": (fused, lambda model, opt: optfuse.unfuse(opt)),
    "the optimizer dies": (fused, let_die),
    "reorder": (None, reordered),
    "remove": (reordered, lambda model, reordering: reordering.remove()),
    "nothing": (fused, lambda model, opt: opt),
}


@pytest.mark.parametrize("dims", [(4, 8), (2, 3, 8)], ids=str)
@pytest.mark.parametrize("which", COMES_OR_GOES)
def test_between_forward_and_recomputation(which, dims):
    expected, _ = gradients(dims)
    found, held = gradients(dims, *COMES_OR_GOES[which])
    assert all(map(torch.equal, found, expected))
    if which == "reorder":
        held.remove()
