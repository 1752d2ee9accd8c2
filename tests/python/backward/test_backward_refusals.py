# SPDX-License-Identifier: BSD-3-Clause
"""Backward mode: what needs a gradient after its update is refused in so many
words, never answered with a wrong number."""

import pytest
import torch
from common import (
    adamw,
    assert_same,
    batch,
    fused_backward,
    loss_of,
    refused,
    sgd,
    weights,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import optfuse


def scaled(model, optimizer):
    torch.amp.GradScaler("cpu").scale(loss_of(model, 0)).backward()


def create_graph(model, optimizer):
    loss_of(model, 0).backward(create_graph=True)


def of_a_parallel_model(model, optimizer):
    """DDP reduces a gradient after the hook that would already have used it."""
    parallel = nn.parallel.DistributedDataParallel(model)
    parallel(batch(0)[0]).sum().backward()


REFUSALS = {
    scaled: ("scale",),
    create_graph: ("of shape (3,): backward(create_graph=True)",),
    of_a_parallel_model: ("DistributedDataParallel",),
}


@pytest.mark.parametrize("once", (False, True), ids=("at first", "after an update"))
@pytest.mark.parametrize("act", REFUSALS)
def test_a_pass_that_is_refused_has_updated_nothing(act, once, gloo):
    """Nor has a second one, whatever it is."""
    model, optimizer = fused_backward()
    if once:
        loss_of(model, 0).backward()
        model.zero_grad()
    before = weights(model)
    refused(lambda: act(model, optimizer), *(() if once else REFUSALS[act]))
    assert_same("weights after the refusal", weights(model), before)


def test_options_changed_between_two_passes_of_a_step_are_refused():
    """Stock applies the last ones to all; what the first pass updated had others."""
    first, second = (nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = optfuse.fuse(torch.optim.SGD([first, second], lr=1.0), "backward")
    first.sum().backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(optfuse.Error, match="was changed between"):
        second.sum().backward()
    with pytest.raises(optfuse.Error, match="was changed between"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()
    assert first.tolist() == [0.0] * 4 and second.tolist() == [0.0] * 4


def test_retain_graph_and_backward_again_is_refused():
    model, _optimizer = fused_backward()
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError):  # autograd's own error, of changed weights, or ours
        loss.backward()


def test_reentrant_checkpoint_with_a_shared_block_is_refused():
    """Each nested backward completes a part of the block's gradient."""
    torch.manual_seed(0)
    block = nn.Linear(6, 6)
    optimizer = optfuse.fuse(adamw(block.parameters()), mode="backward")
    x = batch(0)[0].requires_grad_()
    for _ in range(2):
        x = checkpoint(block, x, use_reentrant=True)
    refused(x.sum().backward)
    assert optfuse.summary(optimizer).mode == "backward"


def test_sparse_gradients_are_refused_before_any_update():
    embed = nn.Embedding(7, 3, sparse=True)
    optimizer = optfuse.fuse(sgd(embed.parameters()), mode="backward")
    before = weights(embed)
    with pytest.raises(optfuse.Error, match="sparse"):
        embed(torch.tensor([1, 2])).sum().backward()
    assert optfuse.summary(optimizer).created == 0
    assert_same("weights after the refusal", weights(embed), before)
