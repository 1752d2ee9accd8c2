# SPDX-License-Identifier: BSD-3-Clause
"""zero_grad() lets go of gradients in C where nobody could tell it from stock's."""

import weakref

import pytest
import torch
from common import adamw, net, python_ok, train
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
