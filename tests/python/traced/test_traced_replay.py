# SPDX-License-Identifier: BSD-3-Clause
"""A traced step() that does what it did before is played by the library; whatever operators a later
step calls otherwise are seen, and have the bits of the class alone."""

import math

import pytest
import torch
from replayed import LATER, STEPS, Replayed, compare, learned, played
from traced_classes import Base


class MayAddNoise(Replayed):
    """Its code names an operator that draws, which is none of the steps'."""

    def later(self, p, grad, state, group, is_late):
        p.sub_(torch.randn_like(grad) if group["eps"] < 0 else grad, alpha=0.01)


class OtherOperator(Replayed):
    def later(self, p, grad, state, group, is_late):
        if is_late:
            p.sub_(grad, alpha=0.01)


class OtherOperand(Replayed):
    def later(self, p, grad, state, group, is_late):
        p.add_(state["v"] if is_late else grad, alpha=0.01)
        state["v"].add_(grad)


class OtherPower(Replayed):
    """The exponent is a number that decides which operator is on the tape."""

    def later(self, p, grad, state, group, is_late):
        p.add_(grad.pow(3 if is_late else 2), alpha=0.01)


class OtherSign(Replayed):
    """clamp() by one number or by two."""

    def later(self, p, grad, state, group, is_late):
        p.add_(grad.clamp(-0.5, None if is_late else 0.5), alpha=0.01)


class NewTensor(Replayed):
    """State is replaced at each step."""

    def later(self, p, grad, state, group, is_late):
        state["v"] = state["v"] * 0.5 + grad * (0.25 if is_late else 0.125)
        p.sub_(state["v"], alpha=0.01)


class OneMore(Replayed):
    def later(self, p, grad, state, group, is_late):
        if is_late:
            state["more"] = 1


class Swallows(Replayed):
    """An error of the library's would never reach it."""

    def later(self, p, grad, state, group, is_late):
        try:
            (p.add_ if is_late else p.sub_)(grad, alpha=0.01)
        except Exception:
            p.mul_(0.5)


class Foreach(Replayed):
    def later(self, p, grad, state, group, is_late):
        torch._foreach_mul_([state["v"]], [0.5 if is_late else 0.25])
        torch._foreach_addcmul_([state["v"]], [grad], [grad], value=0.1)
        torch._foreach_sub_([p], torch._foreach_div([state["v"]], 3 + is_late), alpha=0.01)


class Numbers(Replayed):
    """NaN, zeros of both signs and numbers that grow."""

    def later(self, p, grad, state, group, is_late):
        n = state["n"]
        p.add_(grad, alpha=0.0 if n % 3 else -0.0)
        state["v"].mul_(math.nan if n == LATER + 3 else 1.0).add_(2 * n).sub_(0.5**n)


class Kinds(Replayed):
    """Whole numbers and booleans in turn."""

    def later(self, p, grad, state, group, is_late):
        p.add_(grad, alpha=2 if state["n"] % 2 else 0.5)
        state["v"].add_(True if state["n"] % 3 else 0.25)


class Alias(Replayed):
    """Works on another tensor of the same memory."""

    def later(self, p, grad, state, group, is_late):
        p.detach().add_(grad.detach(), alpha=0.01 if is_late else 0.02)


class ReadsLists(Replayed):
    """The optimizer has a list of each group's first learning rate, as AdaBound has."""

    def __init__(self, params):
        super().__init__(params)
        self.base, self.tables = [1e-3], {"by": {"sign": [(1, -1)]}}

    def later(self, p, grad, state, group, is_late):
        p.sub_(grad, alpha=self.base[0] * self.tables["by"]["sign"][0][0])


class TakesTurns(Replayed):
    """Two tensors change places, as in PNM."""

    def later(self, p, grad, state, group, is_late):
        names = ("m", "v") if state["n"] % 2 else ("v", "m")
        state[names[0]].lerp_(grad, weight=0.01 * state["n"])
        p.sub_(state[names[1]], alpha=0.01)


class NumbersAsTensors(Replayed):
    """Tensors without dimensions that it makes, one of them of a counter."""

    def later(self, p, grad, state, group, is_late):
        state["t"] = state.get("t", torch.zeros(())) + 1
        size = torch.full((), 0.1 + 0.01 * state["n"], dtype=p.dtype)
        p.sub_(torch.div(size, grad.abs() + 1) * (1 - 0.9 ** state["t"]), alpha=0.01)
        state["v"].mul_(torch.tensor(0.5)).add_(torch.tensor(state["n"]))


class NumbersOfOtherDtypes(NumbersAsTensors):
    def later(self, p, grad, state, group, is_late):
        dtype = torch.float64 if is_late else torch.float32
        p.sub_(grad * torch.full((), 0.1 + 0.01 * state["n"], dtype=dtype))


class ByData(Replayed):
    """As before torch.no_grad(): gradients are on, and .data has none."""

    def step(self):
        with torch.enable_grad():
            return Base.step.__wrapped__(self)

    def update(self, p, grad, state, group):
        super().update(p.data, grad.data, state, group)

    def later(self, p, grad, state, group, is_late):
        p.data.mul_(1 - 0.001 * state["n"]).sub_(grad.data.abs(), alpha=0.01)


class OfNorm(Replayed):
    """Calls an operator that no kernel runs, and another one with a number that changes."""

    def later(self, p, grad, state, group, is_late):
        p.sub_(grad / (grad.norm() + 0.1 * state["n"]), alpha=0.01)


class OfNormByATensor(Replayed):
    """Calls an operator with a tensor that is a number, of another dtype from a step on."""

    def later(self, p, grad, state, group, is_late):
        dtype = torch.float64 if is_late else torch.float32
        number = torch.full((), 0.1 * state["n"], dtype=dtype)
        p.sub_(grad / (grad.norm() + number), alpha=0.01)


class Asks(Replayed):
    """Two branches on values, with numbers that change before them and behind."""

    def later(self, p, grad, state, group, is_late):
        n = state["n"]
        if grad.norm() > 4 + 0.01 * n:
            grad = grad * (0.5 + 0.001 * n)
        elif grad.mean() > 0:
            grad = grad - 0.01 * n
        p.sub_(grad, alpha=0.01)


class Lends(Replayed):
    """A value is the number that PyTorch hands to an operator."""

    def later(self, p, grad, state, group, is_late):
        size, length = p.norm(), grad.norm()
        ratio = 1 if size == 0 or length == 0 else size / length
        p.add_(grad, alpha=-0.001 * ratio * (1 + 0.1 * state["n"]))


class ByShape(Replayed):
    def later(self, p, grad, state, group, is_late):
        if p.dim() > 1:
            grad = grad - grad.mean(dim=0, keepdim=True) * (0.5 + 0.001 * state["n"])
        p.sub_(grad / p.shape[0], alpha=0.01)


class OtherQuestion(Replayed):
    def later(self, p, grad, state, group, is_late):
        large, positive = grad.norm() > 4, grad.mean() > 0
        if positive if is_late else large:
            p.sub_(grad, alpha=0.01)


class AsksLater(Replayed):
    """The same tensor, before an operator has written into it or after that."""

    def later(self, p, grad, state, group, is_late):
        size = grad.norm()
        early = None if is_late else bool(size)
        size.sub_(size)
        if bool(size) if is_late else early:
            p.sub_(grad, alpha=0.01)


class AsksMore(Replayed):
    def later(self, p, grad, state, group, is_late):
        size = grad.norm()
        if not is_late or size > 0:
            p.sub_(grad, alpha=0.01)
        if size > 4:
            p.mul_(0.99)


LIKE_BEFORE = (MayAddNoise, Replayed, NewTensor, Foreach, Numbers, Alias, ReadsLists, TakesTurns)
LIKE_BEFORE += (NumbersAsTensors, ByData)
CALLING = (OfNorm, OfNormByATensor, Asks, Lends, ByShape)
OTHERWISE = (OtherOperator, OtherOperand, OtherPower, OtherSign, OneMore, Swallows, Kinds)
OTHERWISE += (NumbersOfOtherDtypes, OtherQuestion, AsksLater, AsksMore)


@pytest.mark.parametrize("mode", ("forward", "backward"))
@pytest.mark.parametrize("make", LIKE_BEFORE)
def test_steps_with_other_numbers_are_played(make, mode):
    traced = compare(make, mode)
    (cohort,) = traced._cohorts
    assert not traced.untraced
    assert played(cohort) > STEPS / 2, (learned(cohort), played(cohort))


@pytest.mark.parametrize("mode", ("forward", "backward"))
@pytest.mark.parametrize("make", CALLING)
def test_steps_that_call_operators_and_branch_on_values_are_played(make, mode):
    traced = compare(make, mode)
    assert not traced.untraced
    for cohort in traced._cohorts:
        assert played(cohort) > STEPS / 2, (learned(cohort), played(cohort))


@pytest.mark.parametrize("mode", ("forward", "backward"))
@pytest.mark.parametrize("make", OTHERWISE)
def test_a_step_that_does_something_else_is_recorded(make, mode):
    traced = compare(make, mode)
    assert not traced.untraced
    assert learned(traced._cohorts[0]) > 0


class Branches(Replayed):
    """Every third step does more."""

    def later(self, p, grad, state, group, is_late):
        if state["n"] % 3 == 0:
            p.mul_(0.9)


def test_steps_that_take_turns_give_up_learning():
    traced = compare(Branches, "forward")
    assert learned(traced._cohorts[0]) <= 4


def test_gradients_are_on_or_off_as_they_were():
    class TurnsOn(Replayed):
        def later(self, p, grad, state, group, is_late):
            with torch.set_grad_enabled(is_late):
                state["v"].add_(grad)

    traced = compare(TurnsOn, "forward")
    assert learned(traced._cohorts[0]) == 2 and not traced.untraced


def test_a_step_whose_results_need_gradients_is_not_played():
    class Follows(Replayed):
        def later(self, p, grad, state, group, is_late):
            with torch.enable_grad():
                twice = p * 2
            p.sub_(twice.detach(), alpha=0.01)

    traced = compare(Follows, "forward")
    assert played(traced._cohorts[0]) == 0
