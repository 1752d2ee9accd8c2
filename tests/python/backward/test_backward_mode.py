# SPDX-License-Identifier: BSD-3-Clause
"""Backward mode: the update runs inside backward(), and the gradient is gone
afterwards."""

import pytest
import torch
from common import (
    adamw,
    fused_backward,
    loss_of,
    net,
    sgd,
    weights,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import optfuse


def test_the_update_runs_inside_backward():
    model, optimizer = fused_backward()
    before = weights(model)
    loss_of(model, 0).backward()
    assert all((p != before[k]).any() for k, p in model.state_dict().items())
    assert optfuse.summary(optimizer).created == len(before)


def test_layers_are_updated_while_backward_still_runs():
    """The last layer's weight is new when the gradient reaches the first, and its bias, which
    waits for the next weight. A weight fills a bucket."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))
    optimizer = optfuse.fuse(adamw(model.parameters()), mode="backward", bucket_bytes=4 << 20)
    seen, created = [], []

    def look(*_):
        seen.append([p in optimizer.state for p in model.parameters()])
        created.append(optfuse.summary(optimizer).created)

    model[0].register_full_backward_pre_hook(look)
    model(torch.ones(2, 1024)).sum().backward()
    (updated,) = seen
    assert updated[2] and all(updated[4:]), updated
    assert created[0] >= 21, f"{created} of 11 weights and their biases, but for the last of these"


@pytest.mark.parametrize("make", (adamw, sgd))
def test_gradients_are_freed_during_backward(make):
    model = net()
    optimizer = optfuse.fuse(make(model.parameters()), mode="backward")
    storages = []
    for p in model.parameters():
        p.register_hook(lambda g: storages.append(StorageWeakRef(g.untyped_storage())))
    for i in range(2):
        optimizer.zero_grad()
        storages.clear()
        loss_of(model, i).backward()
        left = sum(not s.expired() for s in storages)
        assert storages and left == 0, f"{left} of {len(storages)} gradients are still there"
        optimizer.step()


# Hooks of others
