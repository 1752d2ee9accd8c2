# SPDX-License-Identifier: BSD-3-Clause
"""Backward mode: a gradient that was applied and freed is not "no gradient".
Stock would apply it again, so step() refuses instead of leaving it out."""

import copy

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
from scripts import trained
from torch import nn

import optfuse

AGAIN = "zero_grad()"


def test_a_second_optimizer_in_forward_mode_finds_the_gradient_gone():
    p = nn.Parameter(torch.ones(3))
    first = optfuse.fuse(sgd([p]), mode="backward")
    second = optfuse.fuse(sgd([p]))
    p.sum().backward()
    first.step()
    refused(second.step, "already been applied", way_out=AGAIN)


def test_a_parameter_left_out_of_the_next_backward_without_zero_grad():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = optfuse.fuse(sgd([a, b]), mode="backward")
    (a.sum() + b.sum()).backward()
    optimizer.step()
    a.grad = None
    a.sum().backward()
    refused(optimizer.step, "parameter 1 of group 0", way_out=AGAIN)


MOVES = {
    "cpu": lambda model: model.cpu(),
    "double": lambda model: model.double(),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "dtype and device": lambda model: model.to("cpu", torch.float64),
    "type": lambda model: model.type(torch.float64),
    "memory format": lambda model: model.to(memory_format=torch.channels_last),
    "meta": lambda model: model.to("meta"),
}


@pytest.fixture(params=(False, True), ids=("data", "swapped"))
def swapping(request):
    """How Module.to() puts what it has converted into its parameters."""
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield request.param
    torch.__future__.set_swap_module_params_on_conversion(False)


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))


@pytest.mark.parametrize("move", MOVES)
def test_a_moved_model_has_consumed_gradients_there(move, swapping):
    ours, optimizer = fused_backward(sgd, convolutions())
    ours(torch.ones(1, 3, 6, 6)).sum().backward()
    optimizer.step()
    stock = copy.deepcopy(ours)
    for p in stock.parameters():
        p.grad = torch.ones_like(p)
    for model in (ours, stock):
        MOVES[move](model)
    for p, q in zip(ours.parameters(), stock.parameters(), strict=True):
        for what in ("shape", "dtype", "device", "requires_grad"):
            assert getattr(p.grad, what) == getattr(q.grad, what)
        assert p.grad.stride() == q.grad.stride()
        refused(lambda p=p: p.grad.sum(), "already applied")
        refused(lambda p=p: p.grad.clone(), "already applied")
        refused(lambda p=p: p.grad.to(torch.float32).add_(1), "already applied")
    if move != "meta":
        x = torch.ones(1, 3, 6, 6).to(ours[0].weight)
        refused(lambda: ours(x).sum().backward(), "already applied")


@pytest.mark.parametrize("when", ("before step", "after step"))
def test_training_goes_on_after_a_model_was_cast_to_and_fro(when, swapping):
    def before_step(model, optimizer, i):
        if when == "before step":
            model.double().float()

    def between(model, optimizer, i):
        if when == "after step":
            model.double().float()

    same(
        trained(sgd, before_step=before_step, between=between), mode="backward", prove=not swapping
    )


def test_sharing_the_memory_of_consumed_gradients_names_the_way_out():
    model, optimizer = fused_backward()
    train(model, optimizer, 0)
    refused(model.share_memory, "raw memory", way_out=AGAIN)
    optimizer.zero_grad()
    model.share_memory()


def test_the_two_losses_of_a_generative_adversarial_network():
    """The discriminator gets gradients of three losses, and those of the last are zeroed."""

    def script(wrap):
        generator, judge = net(), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        of_generator, of_judge = (wrap(adamw(m.parameters())) for m in (generator, judge))
        for i in range(4):
            noise, real = batch(i)
            judge.zero_grad()
            with optfuse.accumulate(of_judge):
                judge(real).square().mean().backward()
            fake = generator(noise)
            (1 - judge(fake.detach())).square().mean().backward()
            of_judge.step()
            judge.zero_grad()
            generator.zero_grad()
            with optfuse.accumulate(of_judge):
                judge(fake).square().mean().backward()
            of_generator.step()
        yield from everything(judge, of_judge)
        yield from everything(generator, of_generator)

    same(script, mode="backward")


def test_unfuse_leaves_no_consumed_gradient_behind():
    """A gradient that nobody can read any more is as after zero_grad(); the others stay."""
    model, optimizer = fused_backward()
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    train(model, optimizer, 0)
    kept = model[0].weight.grad = torch.ones_like(model[0].weight)
    optfuse.unfuse(optimizer)
    gradients = [p.grad for p in model.parameters()]
    assert gradients[0] is kept and gradients[1:] == [None] * (len(gradients) - 1)
    assert all(p.grad is not None for p in other.parameters())
    before = weights(model)
    optimizer.step()  # stock's: of the gradient that is there
    changed = [name for name in before if not torch.equal(weights(model)[name], before[name])]
    assert changed == ["0.weight"]


def test_unfuse_leaves_that_of_a_parameter_that_has_left():
    """No zero_grad() of the optimizer's takes it away: stock's next pass adds to it."""
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    groups = [{"params": list(layer.parameters())} for layer in (first, last)]
    optimizer = optfuse.fuse(torch.optim.SGD(groups, lr=0.1), "backward")

    def backward():
        last(first(torch.ones(2, 6))).square().mean().backward()

    backward()
    optimizer.step()
    optimizer.param_groups.pop(0)
    optfuse.unfuse(optimizer)
    optimizer.zero_grad()
    assert last.weight.grad is None
    with pytest.raises(optfuse.Error, match="already applied"):
        backward()
    first.zero_grad()
    backward()
    assert first.weight.grad.isfinite().all()


def test_an_interrupt_inside_backward_stays_an_interrupt():
    model, optimizer = fused_backward()
    before = weights(model)

    class Interrupting(dict):
        def __getitem__(self, key):
            raise KeyboardInterrupt("here")

    optimizer.param_groups[0] = Interrupting(optimizer.param_groups[0])
    with pytest.raises(KeyboardInterrupt, match="here"):
        loss_of(model, 0).backward()
    assert_same("weights after the interrupt", weights(model), before)


def test_a_scaled_loss_is_noticed_inside_reentrant_checkpointing():
    from torch.utils.checkpoint import checkpoint

    block = nn.Linear(2, 1, bias=False)
    before = weights(block)
    optimizer = optfuse.fuse(sgd(block.parameters()), mode="backward")
    x = torch.ones(1, 2, requires_grad=True)
    loss = torch.amp.GradScaler("cpu").scale(checkpoint(block, x, use_reentrant=True).sum())
    refused(loss.backward, "GradScaler")
    assert_same("weights after the refusal", weights(block), before)
    # The failed backward's leftovers must not matter to the next one.
    optimizer.zero_grad()
    block(x).sum().backward()
    optimizer.step()
    assert optfuse.summary(optimizer).created == 1


def test_a_consumed_gradient_that_someone_keeps_is_not_used_again():
    p = nn.Parameter(torch.ones(3))
    optimizer = optfuse.fuse(sgd([p]), mode="backward")
    kept = []
    for _ in range(3):
        p.sum().backward()
        optimizer.step()
        assert all(p.grad is not grad for grad in kept)
        kept.append(p.grad)
        optimizer.zero_grad()


def test_a_consumed_gradient_that_nobody_keeps_is_used_again():
    """Also where Python has looked at it, as zero_grad() does."""
    p = nn.Parameter(torch.ones(3))
    optimizer = optfuse.fuse(sgd([p]), mode="backward")
    seen = set()
    for _ in range(3):
        p.sum().backward()
        optimizer.step()
        seen.add(p.grad._cdata)
        optimizer.zero_grad()
    assert len(seen) == 1


def test_a_consumed_gradient_that_was_told_to_require_one_is_not_used_again():
    p = nn.Parameter(torch.ones(3))
    optimizer = optfuse.fuse(sgd([p]), mode="backward")
    p.sum().backward()
    optimizer.step()
    p.grad.requires_grad_()
    optimizer.zero_grad()
    p.sum().backward()
    assert not p.grad.requires_grad


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_the_storage_of_a_consumed_gradient_is_given_to_nobody():
    """PyTorch's is_shared() would end the process; see programs/deeds/leaving.py."""
    model, optimizer = fused_backward()
    train(model, optimizer, 0)
    grad = model[0].weight.grad
    for ask in (grad.untyped_storage, grad.storage, grad.data.untyped_storage, grad.is_shared):
        refused(ask, "raw memory", "already applied it and freed it")
    grad.zero_()
    storage = grad.untyped_storage()
    assert storage.nbytes() == grad.numel() * 4 and not storage.is_shared()
    storage.resize_(0)


def test_gradients_zeroed_by_hand_are_updated_in_backward_all_the_same():
    model, optimizer = fused_backward()
    for i in range(4):
        before = weights(model)
        loss_of(model, i).backward()
        assert not any(torch.equal(p, before[name]) for name, p in model.state_dict().items())
        optimizer.step()
        for p in model.parameters():
            p.grad.zero_()


def test_a_gradient_that_could_not_be_overwritten_is_still_consumed():
    model, optimizer = fused_backward()
    train(model, optimizer, 0)
    grad = model[0].weight.grad
    with pytest.raises(RuntimeError, match="must match"):
        grad.copy_(torch.ones(5, 7))
    refused(grad.sum, "already applied")
    refused(lambda: grad.copy_(grad), "already applied")
    refused(lambda: torch._foreach_copy_([grad], [model[2].weight.grad]), "already applied")
    assert grad.zero_().count_nonzero() == 0


def test_a_gradient_that_outlives_its_optimizer_may_be_overwritten():
    model, optimizer = fused_backward()
    loss_of(model, 0).backward()
    del optimizer
    assert model[0].weight.grad.fill_(2.0).mean() == 2


# Gradients in memory of their own


def hidden_of(model, x):
    hidden, _ = model(x)
    return hidden


MODELS = {
    "linear": lambda: (net(), lambda model: loss_of(model, 0)),
    "convolution": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 3)),
        lambda model: model(torch.ones(2, 3, 6, 6)).square().sum(),
    ),
    "recurrent": lambda: (
        nn.LSTM(6, 8),
        lambda model: hidden_of(model, torch.ones(3, 2, 6)).square().sum(),
    ),
    "attention": lambda: (
        nn.TransformerEncoderLayer(8, 2, 16),
        lambda model: model(torch.ones(3, 2, 8)).pow(3).sum(),
    ),
    "used twice": lambda: (
        nn.Linear(6, 6),
        lambda model: model(model(torch.ones(2, 6)).tanh()).square().sum(),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_of_layers_are_their_own(name):
    """So that their updates run inside backward."""
    model, loss = MODELS[name]()
    optimizer = optfuse.fuse(adamw(model.parameters()), mode="backward")
    for i in range(4):
        optimizer.zero_grad()
        loss(model).backward()
        created = optfuse.summary(optimizer).created
        assert created == (i + 1) * len(list(model.parameters()))
        optimizer.step()
