# SPDX-License-Identifier: BSD-3-Clause
"""A traced step() that does what it did before is played by the library; whatever a later step
does otherwise is seen, and has the bits of the class alone."""

import itertools
import math
import random

import pytest
import torch
from traced_classes import Base

import optfuse
from optfuse._link import link_of

STEPS, LATER = 70, 50  # no trial takes more than 45


class Replayed(Base):
    """Counts its steps for each parameter, and draws numbers from the count."""

    def begin_state(self, p, state):
        if not state:
            state["n"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
        state["n"] += 1
        return state["n"]

    def update(self, p, grad, state, group):
        n = self.begin_state(p, state)
        beta = group["betas"][0]
        state["m"].mul_(beta).add_(grad, alpha=1 - beta)
        self.later(p, grad, state, group, n > LATER)
        p.add_(state["m"], alpha=-group["lr"] / (1 - beta**n))

    def later(self, p, grad, state, group, is_late):
        pass


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


class Exchanged(Replayed):
    """From a step on an entry has the tensor that another one had."""

    def later(self, p, grad, state, group, is_late):
        state["v"].add_(grad, alpha=0.5)
        if is_late:
            state["m"], state["v"] = state["v"], state["m"]


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


def trained(make, mode, shapes=((31,), (7, 5), (20,))):
    torch.manual_seed(0)
    random.seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = make(params)
    if mode is not None:
        optfuse.fuse(optimizer, mode=mode)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        sum((p * torch.randn(p.shape)).sum() for p in params).backward()
        optimizer.step()
        scheduler.step()
    return optimizer, params


def assert_same(ours, theirs, where):
    assert torch.equal(ours.detach().nan_to_num(7.0), theirs.detach().nan_to_num(7.0)), where


def compare(make, mode, *shapes):
    theirs, expected = trained(make, None, *shapes)
    ours, found = trained(make, mode, *shapes)
    for i, (p, q) in enumerate(zip(found, expected, strict=True)):
        assert_same(p, q, f"parameter {i}")
        assert list(ours.state[p]) == list(theirs.state[q])
        for key, value in theirs.state[q].items():
            if isinstance(value, torch.Tensor):
                assert_same(ours.state[p][key], value, key)
            else:
                assert ours.state[p][key] == value, key
    return link_of(ours).traced


@pytest.mark.parametrize("mode", ("forward", "backward"))
@pytest.mark.parametrize("make", LIKE_BEFORE)
def test_steps_with_other_numbers_are_played(make, mode):
    traced = compare(make, mode)
    (cohort,) = traced._cohorts
    assert not traced.untraced
    assert cohort.played > STEPS / 2, (cohort.learned, cohort.played)


@pytest.mark.parametrize("mode", ("forward", "backward"))
@pytest.mark.parametrize("make", CALLING)
def test_steps_that_call_operators_and_branch_on_values_are_played(make, mode):
    traced = compare(make, mode)
    assert not traced.untraced
    for cohort in traced._cohorts:
        assert cohort.played > STEPS / 2, (cohort.learned, cohort.played)


@pytest.mark.parametrize("mode", ("forward", "backward"))
@pytest.mark.parametrize("make", OTHERWISE)
def test_a_step_that_does_something_else_is_recorded(make, mode):
    traced = compare(make, mode)
    assert not traced.untraced
    assert traced._cohorts[0].learned > 0


class Keeps(Replayed):
    """At one step it keeps the gradient, which the next one uses."""

    kept: dict[bool, torch.Tensor] = {}

    def later(self, p, grad, state, group, is_late):
        if p.dim() and state["n"] == LATER:
            self.kept[type(self) is Keeps] = grad
        if state["n"] == LATER + 1:
            grad = self.kept[type(self) is Keeps]
        p.sub_(grad, alpha=0.01)


def test_a_tensor_that_a_step_keeps_is_seen():
    def one(mode):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(30))
        optimizer = Keeps([p])
        if mode:
            optfuse.fuse(optimizer, mode=mode)
        for _ in range(STEPS):
            p.grad = torch.randn(30)
            optimizer.step()
        return optimizer, p

    ours, p = one("forward")
    _, q = one(None)
    assert_same(p, q, "the parameter")
    assert link_of(ours).traced.untraced == 2


class Notes(Replayed):
    """It gives the parameter an attribute."""

    def later(self, p, grad, state, group, is_late):
        if is_late:
            p.note = 1
        p.sub_(grad, alpha=0.01)


class Option(Replayed):
    def later(self, p, grad, state, group, is_late):
        if is_late:
            group["eps"] = 0.5
        p.sub_(grad, alpha=group["eps"])


class DropsGradient(Replayed):
    def later(self, p, grad, state, group, is_late):
        p.sub_(grad, alpha=0.01)
        if is_late:
            p.grad = None


class Forgets(Replayed):
    def later(self, p, grad, state, group, is_late):
        if "v" not in state:
            state["v"] = torch.zeros_like(p)
        p.sub_(state["v"].add_(grad), alpha=0.01)
        if is_late:
            del state["v"]


class TurnsGradientsOn(Replayed):
    def later(self, p, grad, state, group, is_late):
        p.sub_(grad, alpha=0.01)
        if is_late:
            state["v"].requires_grad_(True)


class TurnsGradientsOfNewStateOn(Replayed):
    def later(self, p, grad, state, group, is_late):
        state["v"] = grad * 0.5
        p.sub_(state["v"], alpha=0.01)
        if is_late:
            state["v"].requires_grad_(True)


@pytest.mark.parametrize(
    ("make", "untraced"),
    (
        (Forgets, 1),
        (TurnsGradientsOfNewStateOn, STEPS - LATER),
        (TurnsGradientsOn, STEPS - LATER),
        (Notes, STEPS - LATER),
        (Option, 1),
        (DropsGradient, STEPS - LATER),
        (Exchanged, STEPS - LATER),
    ),
)
def test_what_a_step_does_beside_updates_is_seen(make, untraced):
    theirs, expected = trained(make, None)
    ours, found = trained(make, "forward")
    for p, q in zip(found, expected, strict=True):
        assert_same(p, q, "a parameter")
    assert link_of(ours).traced.untraced == untraced
    assert ours.param_groups[0]["eps"] == theirs.param_groups[0]["eps"]


class Draws(Replayed):
    def later(self, p, grad, state, group, is_late):
        if is_late:
            p.sub_(grad, alpha=0.01 * random.random())


class Appends(Replayed):
    def __init__(self, params):
        super().__init__(params)
        self.seen = []

    def later(self, p, grad, state, group, is_late):
        if is_late:
            self.seen.append(state["n"])
            p.sub_(grad, alpha=0.01 * len(self.seen))


class Slotted:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0

    def __repr__(self):
        return f"{self.n}"


class CountsInAnOption(Replayed):
    def __init__(self, params):
        super().__init__(params, counter=Slotted())

    def later(self, p, grad, state, group, is_late):
        if is_late:
            group["counter"].n += 1
            p.sub_(grad, alpha=0.01 * group["counter"].n)


class CountsInAnAttribute(Replayed):
    def __init__(self, params):
        super().__init__(params)
        self.counter = Slotted()

    def later(self, p, grad, state, group, is_late):
        if is_late:
            self.counter.n += 1
            p.sub_(grad, alpha=0.01 * self.counter.n)


class TakesFromAnAttribute(Replayed):
    def __init__(self, params):
        super().__init__(params)
        self.numbers = itertools.count(1)

    def later(self, p, grad, state, group, is_late):
        if is_late:
            p.sub_(grad, alpha=0.01 * next(self.numbers))


COUNTED = [0]


class CountsInAGlobal(Replayed):
    def __init__(self, params):
        super().__init__(params)
        COUNTED[0] = 0

    def later(self, p, grad, state, group, is_late):
        if is_late:
            COUNTED[0] += 1
            p.sub_(grad, alpha=0.01 * COUNTED[0])


class Counter(Slotted):
    def more(self):
        self.n += 1
        return self.n


GLOBAL, NUMBERS = Counter(), iter(())


def adds_to_a_global(optimizer):
    GLOBAL.n += 1
    return GLOBAL.n


def calls_a_method_of_a_global(optimizer):
    return GLOBAL.more()


def takes_from_a_global(optimizer):
    return next(NUMBERS)


def takes_within(optimizer):
    def count():
        GLOBAL.n += 1
        return GLOBAL.n

    return count()


def adds_to_the_class(optimizer):
    type(optimizer).total += 1
    return optimizer.total


def adds_to_a_variable_that_is_the_class(optimizer):
    cls = type(optimizer)
    cls.total += 1
    return optimizer.total


def sets_by_name(optimizer):
    setattr(type(optimizer), "total", optimizer.total + 1)  # noqa: B010
    return optimizer.total


def adds_to_a_list_of_the_class(optimizer):
    optimizer.totals.append(1)
    return len(optimizer.totals)


def adds_to_what_is_left_out(optimizer, totals=[]):  # noqa: B006
    totals.append(1)
    return len(totals)


def in_a_closure(totals):
    def adds_to_a_closure(optimizer):
        totals.append(1)
        return len(totals)

    return adds_to_a_closure


CLOSED = []
ELSEWHERE = (adds_to_a_global, calls_a_method_of_a_global, takes_from_a_global, takes_within)
ELSEWHERE += (adds_to_the_class, adds_to_a_list_of_the_class, adds_to_what_is_left_out)
ELSEWHERE += (adds_to_a_variable_that_is_the_class, sets_by_name)
ELSEWHERE += (in_a_closure(CLOSED), None)  # None: by an attribute


class Counts(Replayed):
    """Outside of the optimizer, where no trial comes."""

    total, totals = 0, []

    def later(self, p, grad, state, group, is_late):
        if is_late:
            p.sub_(grad, alpha=0.01 * self.more(self))


class CallsAnAttribute(Counts):
    """The code of an attribute is none of the class's."""

    def __init__(self, params):
        super().__init__(params)
        self.more = adds_to_a_global


def from_0(count):
    global NUMBERS
    GLOBAL.n, NUMBERS = 0, itertools.count(1)
    for totals in (CLOSED, Counts.totals, *(getattr(count, "__defaults__", None) or ())):
        totals.clear()
    if count is None:
        return CallsAnAttribute
    return type("Counts", (Counts,), {"more": staticmethod(count), "total": 0})


TWICE = (Draws, CountsInAnOption, CountsInAnAttribute, TakesFromAnAttribute)
TWICE += (CountsInAGlobal,)


class FillsAnOption(Replayed):
    def __init__(self, params):
        super().__init__(params, seen=[0])

    def later(self, p, grad, state, group, is_late):
        if is_late:
            group["seen"].append(state["n"])
        p.sub_(grad, alpha=0.01 * len(group["seen"]))


def test_a_list_that_a_step_fills_is_seen():
    """Other parameters read it, so that there is no way but to refuse."""
    with pytest.raises(optfuse.Error, match="does not treat parameters independently"):
        trained(FillsAnOption, "forward")


def test_a_list_of_the_optimizer_that_a_late_step_fills_is_filled_once():
    theirs, _ = trained(Appends, None, ((31,),))
    ours, _ = trained(Appends, "forward", ((31,),))
    assert ours.seen == theirs.seen == list(range(LATER + 1, STEPS + 1))
    compare(Appends, "forward", ((31,),))
    assert link_of(ours).traced.untraced == STEPS - LATER


def test_a_list_that_late_steps_fill_once_for_all_parameters_is_filled_once():
    """Each kind of parameter has a run of step(): one list for all would get an item of each."""

    class FillsOnce(Appends):
        @torch.no_grad()
        def step(self):
            if self.state and next(iter(self.state.values()))["n"] >= LATER:
                self.seen.append(1)
            Base.step(self)

        def later(self, p, grad, state, group, is_late):
            p.sub_(grad, alpha=0.01 * (len(self.seen) + p.dim()))

    theirs, _ = trained(FillsOnce, None)
    compare(FillsOnce, "forward")
    ours, _ = trained(FillsOnce, "forward")
    assert len(ours.seen) == len(theirs.seen) == STEPS - LATER
    assert link_of(ours).traced.untraced == STEPS - LATER


@pytest.mark.parametrize("counts", (False, True))
def test_defaults_are_read_in_steps_that_are_played_and_written_once(counts):
    class OfDefaults(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 1e-2, "n": 0})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                group["n"] += 1
                if counts and group["n"] > LATER:
                    self.defaults["n"] += 1
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=group["lr"] + self.defaults["n"])

    traced = compare(OfDefaults, "forward", ((31,),))
    assert traced.untraced == (STEPS - LATER if counts else 0)
    assert counts or traced._cohorts[0].played > STEPS / 2


def test_an_object_in_a_list_of_the_optimizer_is_written_once():
    class InAList(Replayed):
        def __init__(self, params):
            super().__init__(params)
            self.counters = [(Counter(),)]

        def later(self, p, grad, state, group, is_late):
            if is_late:
                p.sub_(grad, alpha=0.01 * self.counters[0][0].more())

    traced = compare(InAList, "forward", ((31,),))
    assert not traced.untraced and traced._cohorts[0].learned == 0


@pytest.mark.parametrize("make", TWICE)
def test_a_step_that_may_leave_something_twice_is_not_run_twice(make):
    traced = compare(make, "forward", ((31,),))
    assert not traced.untraced and traced._cohorts[0].learned == 0


@pytest.mark.parametrize("count", ELSEWHERE)
def test_a_step_that_counts_elsewhere_is_not_run_twice(count):
    traced = compare(lambda params: from_0(count)(params), "forward", ((31,),))
    assert not traced.untraced and traced._cohorts[0].learned == 0


@pytest.mark.parametrize("where", ("an option", "an attribute", "a list that is long"))
def test_what_it_is_given_late_is_written_once(where):
    class Takes(Replayed):
        counter, history = None, ()

        def later(self, p, grad, state, group, is_late):
            counter = group.get("counter") or self.counter
            if is_late:
                p.sub_(grad, alpha=0.01 * (counter.more() if counter else len(self.history)))

    def one(fused):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(30))
        optimizer = Takes([p])
        if fused:
            optfuse.fuse(optimizer)
        for i in range(STEPS):
            if i == 20 and where == "an option":
                optimizer.param_groups[0]["counter"] = Counter()
            elif i == 20 and where == "an attribute":
                optimizer.counter = Counter()
            elif i == 20:
                optimizer.history = 2000 * [1]
            p.grad = torch.randn(30)
            optimizer.step()
        return optimizer, p

    ours, p = one(True)
    _, q = one(False)
    assert_same(p, q, "the parameter")
    assert link_of(ours).traced._cohorts[0].played < 20


class Branches(Replayed):
    """Every third step does more."""

    def later(self, p, grad, state, group, is_late):
        if state["n"] % 3 == 0:
            p.mul_(0.9)


def test_steps_that_take_turns_give_up_learning():
    traced = compare(Branches, "forward")
    assert traced._cohorts[0].learned <= 4


def test_gradients_are_on_or_off_as_they_were():
    class TurnsOn(Replayed):
        def later(self, p, grad, state, group, is_late):
            with torch.set_grad_enabled(is_late):
                state["v"].add_(grad)

    traced = compare(TurnsOn, "forward")
    assert traced._cohorts[0].learned == 2 and not traced.untraced


def test_a_step_whose_results_need_gradients_is_not_played():
    class Follows(Replayed):
        def later(self, p, grad, state, group, is_late):
            with torch.enable_grad():
                twice = p * 2
            p.sub_(twice.detach(), alpha=0.01)

    traced = compare(Follows, "forward")
    assert traced._cohorts[0].played == 0
