# SPDX-License-Identifier: BSD-3-Clause
"""Deeds of optimizers whose step() is recorded: each class has the bits of stock by one guard."""

import contextlib
import threading

import torch
from recorded_classes import KINDS, Base
from torch import nn

from programs.deed import ALONE, EITHER, deed, raises


def of_bits(guard):
    """Registers a class whose bits need this guard."""

    def register(cls):
        def train(world):
            world.train()

        train.__name__ = f"train_by_{cls.__name__}"
        deed(make=cls, weight=0, fault=guard, turns=5)(train)
        return cls

    return register


@deed(kinds=("drawn",), weight=20)
def change_its_numbers(world):
    """Others than its options."""
    for optimizer in world.optimizers:
        optimizer.options["scale"] *= 0.9
        for group in optimizer.param_groups:
            group["lr"] *= 0.9


of_bits("recorded_settings")(KINDS["Settings"])
of_bits("recorded_show")(KINDS["KeepsAnAddress"])
of_bits("ahead_owners")(KINDS["Coupled"])


@of_bits("recorded_data")
class Exchanges(Base):
    """Other memory for a tensor that a line has."""

    def one(self, p, group, state):
        before = p.data
        p.mul_(0.5)
        p.data = torch.ones_like(p)
        state["m"].copy_(before)
        p.sub_(p.grad * state["m"], alpha=group["lr"])


@of_bits("recorded_order")
class Sorts(Base):
    """An operator that no line is reads what lines write."""

    def one(self, p, group, state):
        state["m"].mul_(0.5).add_(p.grad)
        order = state["m"].view(-1).argsort()
        p.sub_(state["m"].view(-1)[order].view_as(p), alpha=group["lr"])


@of_bits("recorded_graph")
class Differentiates(Base):
    def one(self, p, group, state):
        with torch.enable_grad():
            x = p.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad((x * p.grad).square().sum(), x)
        p.sub_(slope, alpha=group["lr"])


@of_bits("recorded_overlap")
class Shifts(Base):
    """Goes on after an operator that fails by the memory of its operands."""

    def one(self, p, group, state):
        flat = state["m"].add_(p.grad).view(-1)
        with contextlib.suppress(RuntimeError):
            flat[1:].add_(flat[:-1])
        p.sub_(state["m"], alpha=group["lr"])


@of_bits("recorded_readers")
class ChangesItsNumber(Base):
    def one(self, p, group, state):
        norm = p.grad.norm()
        scaled = p.grad * norm
        norm.mul_(0.5)
        p.sub_(scaled, alpha=group["lr"])


@of_bits("recorded_parts")
class Parts(Base):
    """Tensors of some of the same elements, by turns."""

    def one(self, p, group, state):
        flat, grad = state["m"].view(-1), p.grad.reshape(-1)
        flat[1:].add_(grad[1:])
        flat.mul_(0.5)
        flat[1:].add_(grad[1:])
        p.sub_(state["m"], alpha=group["lr"])


class Waits(Base):
    raised = []

    def one(self, p, group, state):
        p.sub_(p.grad, alpha=group["lr"])
        thread = threading.Thread(target=self.zero, args=(p.grad,))
        thread.start()
        thread.join()

    def zero(self, gradient):
        try:
            gradient.zero_()
        except RuntimeError as error:
            self.raised.append(error)


@deed(ALONE, fault="recorded_seal", proves=False, backward=EITHER)
def another_thread_writes_what_a_line_will_read(world):
    Waits.raised.clear()
    world.own(make=Waits)
    world.train()
    world.see("raised", bool(Waits.raised) or world.mode != "forward")


class Shares(Base):
    """Steps by the number of gradients that there are."""

    def one(self, p, group, state):
        n = sum(q.grad is not None for other in self.param_groups for q in other["params"])
        p.sub_(p.grad, alpha=group["lr"] / n)


class Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@deed(ALONE, fault="ahead_unexpected", proves=False, backward=EITHER)
def gradient_that_does_not_come(world):
    model, _ = world.own("layers", make=Shares)

    def loss():
        first, *others = model.parameters()
        cut = Cut.apply(first).sum() if world.i == 3 else first.square().sum()
        return cut + sum(p.square().sum() for p in others)

    for _ in range(5):
        world.train(loss)
    world.look(gradients=False)


def with_a_rate(rate):
    p = nn.Parameter(torch.ones(4))
    return p, KINDS["Elementwise"]([p], lr=rate)


@deed(ALONE, fault="late_values", backward=raises("between backward() and step()"), proves=False)
def rate_written_through_data_before_step(world):
    rate = torch.tensor(0.1)
    p, optimizer = with_a_rate(rate)
    world.wrap(optimizer)
    for i in range(3):
        optimizer.zero_grad()
        p.sum().backward()
        if i == 2:
            rate.data.mul_(0.5)
        optimizer.step()
    world.see("weight", p)
