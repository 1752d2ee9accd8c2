# SPDX-License-Identifier: BSD-3-Clause
"""zero_grad() lets go of gradients in C where nobody could tell it from stock's."""

import weakref

import pytest
import torch
from common import adamw, everything, fused_backward, net, python_ok, refused, same, train
from torch import nn
from torch.optim import Optimizer

import optfuse

both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))


@both_modes
@pytest.mark.parametrize("changed", (False, True))
def test_stock_is_not_asked(changed, mode, monkeypatch):
    """Nor where a scheduler gives another rate after each step()."""
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()), mode=mode)
    asked = []
    ours = "optfuse._fused.methods.ZERO_GRAD"

    def stock(self, set_to_none=True):
        asked.append(set_to_none)
        for p in model.parameters():
            p.grad = None

    monkeypatch.setattr(Optimizer, "zero_grad", stock)
    monkeypatch.setattr(ours, stock)
    for i in range(3):
        train(model, optimizer, i)
        optimizer.param_groups[0]["lr"] *= 0.5 if changed else 1
        optimizer.zero_grad()
    assert asked == []
    optimizer.zero_grad(set_to_none=False)
    assert asked == [False]


class Counting(torch.optim.AdamW):
    zeroed = 0

    def zero_grad(self, set_to_none=True):
        self.zeroed += 1
        super().zero_grad(set_to_none)


@both_modes
def test_a_zero_grad_of_the_class_itself_is_called(mode):
    optfuse.register(Counting, per_parameter=True)
    model = net()
    optimizer = optfuse.fuse(Counting(model.parameters()), mode=mode)
    for i in range(3):
        train(model, optimizer, i)
    assert optimizer.zeroed == 3


@both_modes
def test_a_replaced_zero_grad_of_all_optimizers_is_called(mode, monkeypatch):
    called = []
    stock = Optimizer.zero_grad
    monkeypatch.setattr(
        Optimizer, "zero_grad", lambda self, *args: (called.append(args), stock(self, *args))
    )
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()), mode=mode)
    train(model, optimizer, 0)
    assert len(called) == 1


@both_modes
def test_all_gradients_are_none_afterwards_and_die(mode):
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()), mode=mode)
    for i in range(3):
        train(model, optimizer, i)
    optfuse.flush(optimizer)
    gradients = [weakref.ref(p.grad) for p in model.parameters()]
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    if mode == "forward":  # backward mode keeps those that are consumed, for the next time
        assert all(gradient() is None for gradient in gradients)


@both_modes
def test_gradients_someone_has_stay_his(mode):
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(3):
            train(model, optimizer, i)
            if not wrap.fused or mode == "forward":
                kept = model[0].weight.grad
                optimizer.zero_grad()
                assert model[0].weight.grad is None
                kept.mul_(2)
            optimizer.zero_grad()
        yield from everything(model, optimizer)

    same(script, mode)


@both_modes
def test_a_parameter_added_by_hand_is_zeroed_too(mode):
    def script(wrap):
        model, late = net(), nn.Linear(3, 2)
        optimizer = wrap(adamw(model.parameters()))
        for i in range(5):
            optimizer.zero_grad()
            loss = (late(model(torch.ones(2, 6))) - i).square().mean()
            loss.backward()
            if i == 2:
                late.zero_grad()
            optimizer.step()
            if i == 2:
                optimizer.param_groups[0]["params"] += late.parameters()
                late.weight.grad = torch.ones_like(late.weight)
                optimizer.zero_grad()
                yield "gradients", [p.grad is None for p in (*model.parameters(), late.weight)]
        yield from everything(nn.Sequential(model, late), optimizer)

    same(script, mode)


def test_a_zero_grad_that_was_replaced_before_we_came_is_called():
    called = python_ok("""
import torch
stock, called = torch.optim.Optimizer.zero_grad, []
torch.optim.Optimizer.zero_grad = lambda self, *args: (called.append(1), stock(self, *args))
import optfuse
p = torch.nn.Parameter(torch.ones(3))
optimizer = optfuse.fuse(torch.optim.AdamW([p], fused=True))
p.sum().backward()
optimizer.zero_grad()
print(called, p.grad)
""")
    assert called.strip() == "[1] None"


@both_modes
def test_parameters_of_a_class_with_a_grad_of_its_own(mode):
    class Noting(nn.Parameter):
        dropped = 0

        @property
        def grad(self):
            return torch.Tensor.grad.__get__(self)

        @grad.setter
        def grad(self, value):
            Noting.dropped += value is None
            torch.Tensor.grad.__set__(self, value)

    p = Noting(torch.ones(3))
    optimizer = optfuse.fuse(adamw([p]), mode=mode)
    for _ in range(2):
        p.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert Noting.dropped == 2


def test_a_finalizer_of_a_gradient_may_unfuse_the_optimizer():
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    train(model, optimizer, 0)
    optfuse.flush(optimizer)

    class Unfuses:
        def __del__(self):
            optfuse.unfuse(optimizer)

    model[0].bias.grad.unfuses = Unfuses()
    optimizer.zero_grad()
    assert type(optimizer) is torch.optim.AdamW
    assert all(p.grad is None for p in model.parameters())
    train(model, optimizer, 1)


def test_a_finalizer_of_a_gradient_may_change_the_optimizer():
    """Nothing is lost when what dies in zero_grad() adds parameters to the optimizer."""
    model, late = net(), nn.Linear(3, 3)
    optimizer = optfuse.fuse(adamw(model.parameters()))
    train(model, optimizer, 0)
    optfuse.flush(optimizer)

    class Adds:
        def __del__(self):
            optimizer.add_param_group({"params": list(late.parameters())})

    model[2].weight.grad.adds = Adds()
    late.weight.grad = torch.ones_like(late.weight)
    optimizer.zero_grad()
    assert len(optimizer.param_groups) == 2
    assert all(p.grad is None for p in model.parameters())
    late(model(torch.ones(1, 6))).square().sum().backward()
    before = late.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, late.weight)


def test_backward_mode_still_refuses_to_throw_applied_gradients_away():
    model, optimizer = fused_backward()
    train(model, optimizer, 0)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(torch.ones(2, 6)), torch.ones(2, 3)).backward()
    refused(optimizer.zero_grad, "step()")
