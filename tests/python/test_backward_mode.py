# SPDX-License-Identifier: BSD-3-Clause
"""Backward mode: the update runs inside backward(), and the gradient is gone
afterwards. What needs it later is refused in so many words, never answered
with a wrong number."""

import gc
import os

import pytest
import torch
from common import adamw, assert_same, batch, everything, loss_of, net, same, sgd, snapshot, train
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import optfuse

STEPS = 6
WAY_OUT = 'mode="forward"'


def fused(make=adamw, model=None):
    torch.manual_seed(0)
    model = model or net()
    return model, optfuse.fuse(make(model.parameters()), mode="backward")


def refused(call, *words):
    """Calls it, which must raise optfuse.Error with the way out; its message."""
    with pytest.raises(optfuse.Error) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    for word in (WAY_OUT, *words):
        assert word in message, f"{word!r} is not in the message: {message}"
    return message


def weights(model):
    return snapshot(dict(model.state_dict()))


# What works


@pytest.mark.parametrize("make", (adamw, sgd))
@pytest.mark.parametrize("set_to_none", (True, False))
def test_training_is_that_of_stock(make, set_to_none):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        for i in range(STEPS):
            yield "loss", train(model, optimizer, i, set_to_none)
            yield from everything(model, optimizer)

    same(script, mode="backward")


def test_the_update_runs_inside_backward():
    model, optimizer = fused()
    before = weights(model)
    loss_of(model, 0).backward()
    assert all((p != before[k]).any() for k, p in model.state_dict().items())
    assert optfuse.summary(optimizer).created == len(before)


def test_layers_are_updated_while_backward_still_runs():
    """The last layer's weight is new when the gradient reaches the first."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
    optimizer = optfuse.fuse(adamw(model.parameters()), mode="backward")
    seen = []
    model[0].register_full_backward_pre_hook(
        lambda *_: seen.append(optfuse.summary(optimizer).created)
    )
    model(torch.ones(2, 256)).sum().backward()
    assert seen and seen[0] >= 20, f"{seen} of 24 updates were made before the first layer's turn"


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


def test_frozen_and_unused_parameters_stay():
    def script(wrap):
        model = net()
        model[0].weight.requires_grad_(False)
        model.unused = nn.Linear(3, 3)
        whole = nn.ModuleList([model, model.unused])
        model = model[:5]
        optimizer = wrap(adamw(whole.parameters()))
        for i in range(STEPS):
            train(model, optimizer, i)
        yield from everything(whole, optimizer)

    same(script, mode="backward")


def test_requires_grad_switched_on_later():
    def script(wrap):
        model = net()
        model[0].requires_grad_(False)
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            model[0].requires_grad_(i >= 2)
            train(model, optimizer, i)
        yield from everything(model, optimizer)

    same(script, mode="backward")


def test_gradients_set_by_hand_are_applied_by_step():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            if i % 2:
                train(model, optimizer, i)
            else:
                for p in model.parameters():
                    p.grad = torch.full_like(p, 0.1 * i)
                optimizer.step()
        yield from everything(model, optimizer)

    same(script, mode="backward")


def test_tied_weights():
    def script(wrap):
        embed = nn.Embedding(7, 6)
        optimizer = wrap(sgd(embed.parameters()))
        for i in range(STEPS):
            optimizer.zero_grad()
            (embed(torch.tensor([1, 2, i])) @ embed.weight.t()).square().sum().backward()
            optimizer.step()
        yield from everything(embed, optimizer)

    same(script, mode="backward")


def with_checkpoint(model, i):
    x, y = batch(i)
    hidden = checkpoint(model[:3], x, use_reentrant=False)
    return nn.functional.mse_loss(model[3:](hidden), y)


def with_autocast(model, i):
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, i)


def with_slope_of_the_input(model, i):
    x, y = batch(i)
    x.requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return nn.functional.mse_loss(out, y) + slope.square().sum()


@pytest.mark.parametrize("loss", (with_checkpoint, with_autocast, with_slope_of_the_input))
def test_ways_to_reach_backward(loss):
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            optimizer.zero_grad()
            loss(model, i).backward()
            optimizer.step()
        yield from everything(model, optimizer)

    same(script, mode="backward")


def test_autograd_grad_makes_no_update():
    model, optimizer = fused()
    before = weights(model)
    torch.autograd.grad(loss_of(model, 0), list(model.parameters()))
    assert_same("weights after autograd.grad", weights(model), before)
    assert optfuse.summary(optimizer).created == 0


# Hooks of others


@pytest.mark.parametrize("when", ("before fuse", "after fuse", "both"))
def test_hooks_of_others_fire(when):
    def script(wrap):
        model = net()
        calls = []

        def hook(name):
            for index, p in enumerate(model.parameters()):
                p.register_post_accumulate_grad_hook(lambda _, i=index: calls.append((name, i)))
                p.register_hook(lambda g, i=index: calls.append((f"{name}, tensor", i)))

        if when != "after fuse":
            hook("before")
        optimizer = wrap(adamw(model.parameters()))
        if when != "before fuse":
            hook("after")
        for i in range(STEPS):
            calls.clear()
            train(model, optimizer, i)
            yield "calls", sorted(calls)
        yield from everything(model, optimizer)

    same(script, mode="backward")


def test_a_hook_from_before_fuse_sees_the_gradient():
    def script(wrap):
        model = net()
        norms = {}
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(
                lambda p, name=name: norms.__setitem__(name, p.grad.norm().item())
            )
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            train(model, optimizer, i)
            yield "norms", dict(norms)

    same(script, mode="backward")


def test_a_tensor_hook_that_changes_the_gradient():
    def script(wrap):
        model = net()
        optimizer = wrap(sgd(model.parameters()))
        for p in model.parameters():
            p.register_hook(lambda g: g * 0.5)
        for i in range(STEPS):
            train(model, optimizer, i)
        yield from everything(model, optimizer)

    same(script, mode="backward")


def test_hooks_removed_again_leave_ours():
    def script(wrap):
        model = net()
        hook = nn.Parameter.register_post_accumulate_grad_hook
        handles = [hook(p, lambda _: None) for p in model.parameters()]
        optimizer = wrap(adamw(model.parameters()))
        handles += [hook(p, lambda _: None) for p in model.parameters()]
        train(model, optimizer, 0)
        for handle in handles:
            handle.remove()
        for i in range(1, STEPS):
            train(model, optimizer, i)
        yield from everything(model, optimizer)

    same(script, mode="backward")


def test_an_evicted_hook_is_noticed_at_step():
    """Assigning this attribute drops every hook of the slot, ours included."""

    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            if i == 2:
                for p in model.parameters():
                    p._post_accumulate_grad_hooks = {}
            train(model, optimizer, i)
        yield from everything(model, optimizer)

    same(script, mode="backward")


# What is refused, and how


def test_clip_grad_norm_is_refused():
    model, _optimizer = fused()
    loss_of(model, 0).backward()
    refused(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def test_clip_grad_value_is_refused():
    model, _optimizer = fused()
    loss_of(model, 0).backward()
    refused(lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0))


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
def test_a_spent_gradient_says_who_reads_it(read):
    model, _optimizer = fused()
    loss_of(model, 0).backward()
    message = refused(lambda: READS[read](model[4].bias.grad), "gradient", "shape (3")
    assert "::" in message or read in message, f"no operator is named: {message}"


def test_grad_scaler_is_refused_before_a_wrong_update():
    model, _optimizer = fused()
    before = weights(model)
    scaler = torch.amp.GradScaler("cpu")
    refused(lambda: scaler.scale(loss_of(model, 0)).backward(), "scale")
    assert_same("weights after a scaled loss", weights(model), before)


def test_unscale_is_refused():
    model, optimizer = fused()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    loss_of(model, 0).backward()
    refused(lambda: scaler.unscale_(optimizer))


def test_a_disabled_grad_scaler_is_no_reason_to_refuse():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for i in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, i)).backward()
            scaler.step(optimizer)
            scaler.update()
        yield from everything(model, optimizer)

    same(script, mode="backward")


@pytest.mark.parametrize("make", (adamw, sgd))
def test_a_second_backward_without_zero_grad_is_refused(make):
    model, _optimizer = fused(make)
    loss_of(model, 0).backward()
    once = weights(model)
    refused(lambda: loss_of(model, 1).backward())
    assert_same("weights after the refusal", weights(model), once)


def test_gradient_accumulation_after_step_is_refused():
    """Stock would add to the gradient of the last iteration."""
    model, optimizer = fused()
    loss_of(model, 0).backward()
    optimizer.step()
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


def test_retain_graph_and_backward_again_is_refused():
    model, _optimizer = fused()
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError):  # autograd's own error, of changed weights, or ours
        loss.backward()


def test_create_graph_is_refused_before_any_update():
    model, _optimizer = fused()
    before = weights(model)
    refused(lambda: loss_of(model, 0).backward(create_graph=True), "create_graph")
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


def test_reentrant_checkpoint_of_separate_blocks_works():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            optimizer.zero_grad()
            x = batch(i)[0].requires_grad_()
            hidden = checkpoint(model[:3], x, use_reentrant=True)
            checkpoint(model[3:], hidden, use_reentrant=True).square().mean().backward()
            optimizer.step()
        yield from everything(model, optimizer)

    same(script, mode="backward")


def test_two_optimizers_on_one_parameter_are_refused():
    model, _first = fused()
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


@pytest.fixture
def gloo(tmp_path):
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    gc.collect()
    dist.destroy_process_group()


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


def test_training_goes_on_after_a_refusal():
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(STEPS):
            if i == 2 and wrap.fused:
                optimizer.zero_grad()
                refused(lambda: loss_of(model, 0).backward(create_graph=True))
            train(model, optimizer, i)
        yield from everything(model, optimizer)

    same(script, mode="backward")
