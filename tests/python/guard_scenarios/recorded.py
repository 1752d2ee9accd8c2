# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers whose step() is recorded."""

import contextlib
import threading

import torch
from recorded_classes import KINDS, Base
from test_backward import check
from test_recorded import World, compare, only_steps

import optfuse
from guard_scenarios.registry import guards, must_raise


def has_stocks_bits(cls):
    try:
        compare(cls, only_steps)
    except RuntimeError as error:
        raise AssertionError(f"stock's step() raises nothing, and this one: {error}") from error


def of_bits(guard):
    """Registers a class whose bits need this guard."""

    def register(cls):
        guards(guard)(lambda: has_stocks_bits(cls))
        return cls

    return register


of_bits("recorded_settings")(KINDS["Settings"])
of_bits("recorded_show")(KINDS["KeepsAnAddress"])


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


@guards("recorded_seal")
def another_thread_does_not_write_what_a_line_will_read():
    raised = []

    def zero(tensor):
        try:
            tensor.zero_()
        except RuntimeError as error:
            raised.append(error)

    class Waits(Base):
        def one(self, p, group, state):
            p.sub_(p.grad, alpha=group["lr"])
            thread = threading.Thread(target=zero, args=(p.grad,))
            thread.start()
            thread.join()

    World(Waits, fused=True).steps(1)
    assert raised, "a gradient was changed before a line had read it"


@guards("ahead_owners")
def combined_parameters_are_left_to_step():
    _, error = check(KINDS["Coupled"], 5 * ["plain"], seed=3)
    assert error is None, error


class Shares(Base):
    """Steps by the number of gradients that there are."""

    def one(self, p, group, state):
        n = sum(q.grad is not None for other in self.param_groups for q in other["params"])
        p.sub_(p.grad, alpha=group["lr"] / n)


@guards("ahead_unexpected")
def a_gradient_that_does_not_come_is_refused():
    check(Shares, ["plain", "plain", "plain", "undefined", "plain"], seed=3)


@guards("late_values")
def a_rate_written_through_data_after_backward_is_not_ignored():
    param, rate = torch.nn.Parameter(torch.ones(4)), torch.tensor(0.1)
    optimizer = optfuse.fuse(KINDS["Elementwise"]([param], lr=rate), "backward")
    for i in range(3):
        optimizer.zero_grad()
        param.sum().backward()
        if i == 2:
            rate.data.mul_(0.5)
            must_raise(optimizer.step, "step() with another learning rate than backward used")
        optimizer.step()
