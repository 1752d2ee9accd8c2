# SPDX-License-Identifier: BSD-3-Clause
"""Backward mode: what needs a gradient after its update is refused in so many
words, never answered with a wrong number."""

import pytest
import torch
from common import (
    adamw,
    assert_same,
    batch,
    everything,
    fused_backward,
    loss_of,
    net,
    refused,
    same,
    sgd,
    train,
    weights,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import optfuse

STEPS = 6


READS = {
    "norm": lambda g: g.norm(),
    "add": lambda g: g + 1,
    "mul": lambda g: g.mul_(2),
    "clone": lambda g: g.clone(),
    "copy": lambda g: torch.zeros(3).copy_(g),
    "isfinite": lambda g: torch.isfinite(g).all(),
    "foreach": lambda g: torch._foreach_norm([g]),
    "item": lambda g: g[0].item(),
    "tolist": lambda g: g.tolist(),
    "numpy": lambda g: g.numpy(),
    "data_ptr": lambda g: g.data_ptr(),
    "repr": repr,
    "detach": lambda g: g.detach().sum(),
    "data": lambda g: g.data.sum(),
}


@pytest.mark.parametrize("read", READS)
def test_a_consumed_gradient_says_who_reads_it(read):
    model, _optimizer = fused_backward()
    loss_of(model, 0).backward()
    message = refused(lambda: READS[read](model[4].bias.grad), "gradient", "shape (3")
    assert "::" in message or read in message, f"no operator is named: {message}"


def test_grad_scaler_is_refused_before_a_wrong_update():
    model, _optimizer = fused_backward()
    before = weights(model)
    scaler = torch.amp.GradScaler("cpu")
    refused(lambda: scaler.scale(loss_of(model, 0)).backward(), "scale")
    assert_same("weights after a scaled loss", weights(model), before)


@pytest.mark.parametrize("make", (adamw, sgd))
def test_a_second_backward_without_zero_grad_is_refused(make):
    model, _optimizer = fused_backward(make)
    loss_of(model, 0).backward()
    once = weights(model)
    refused(lambda: loss_of(model, 1).backward())
    assert_same("weights after the refusal", weights(model), once)


def test_a_gradient_whose_step_was_skipped_is_refused():
    """As in a GAN: the generator's loss also reaches the discriminator, whose
    gradients stock would throw away."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(6, 6), nn.Linear(6, 3)
    theirs = optfuse.fuse(adamw(critic.parameters()), mode="backward")
    critic(generator(batch(0)[0])).sum().backward()
    refused(theirs.zero_grad, "step()")
    once = weights(critic)
    critic.zero_grad()
    refused(lambda: critic(batch(1)[0]).sum().backward(), "step()")
    assert_same("the critic's weights after the refusal", weights(critic), once)


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


def test_create_graph_is_refused_before_any_update():
    model, _optimizer = fused_backward()
    before = weights(model)
    refused(
        lambda: loss_of(model, 0).backward(create_graph=True),
        "of shape (3,): backward(create_graph=True)",
    )
    assert_same("weights after create_graph", weights(model), before)


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


def test_two_optimizers_on_one_parameter_are_refused():
    model, _first = fused_backward()
    second = sgd([model[0].weight])
    refused(lambda: optfuse.fuse(second, mode="backward"), "already")
    assert type(second) is torch.optim.SGD


def test_sparse_gradients_are_refused_before_any_update():
    embed = nn.Embedding(7, 3, sparse=True)
    optimizer = optfuse.fuse(sgd(embed.parameters()), mode="backward")
    before = weights(embed)
    with pytest.raises(optfuse.Error, match="sparse"):
        embed(torch.tensor([1, 2])).sum().backward()
    assert optfuse.summary(optimizer).created == 0
    assert_same("weights after the refusal", weights(embed), before)


@pytest.mark.parametrize("when", ("before fuse", "after fuse"))
def test_data_parallel_models_are_refused_before_any_update(gloo, when):
    """DDP reduces a gradient after the hook that would already have used it."""
    torch.manual_seed(0)
    model = net()
    wrapped = nn.parallel.DistributedDataParallel(model) if when == "before fuse" else None
    optimizer = adamw(model.parameters())

    def fuse_and_train():
        nonlocal wrapped
        optfuse.fuse(optimizer, mode="backward")
        wrapped = wrapped or nn.parallel.DistributedDataParallel(model)
        wrapped(batch(0)[0]).sum().backward()

    before = weights(model)
    refused(fuse_and_train, "DistributedDataParallel")
    assert_same("weights after the refusal", weights(model), before)


def test_data_parallel_models_train_in_forward_mode(gloo):
    for view in (False, True):

        def script(wrap, view=view):
            model = net()
            wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)
            optimizer = wrap(adamw(model.parameters()))
            for i in range(STEPS):
                yield "loss", train(wrapped, optimizer, i)
            yield from everything(model, optimizer)

        same(script, prove=not view)
