# SPDX-License-Identifier: BSD-3-Clause
"""Effects of a step() that is played beside those of its operators are seen, and come once: tensors
that it keeps, attributes that it sets, lists that it fills, counts elsewhere."""

import itertools
import random

import pytest
import torch
from replayed import LATER, STEPS, Replayed, assert_same, compare, learned, played, trained
from traced_classes import Base

import optfuse
from optfuse._link import link_of


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


class Exchanged(Replayed):
    """From a step on an entry has the tensor that another one had."""

    def later(self, p, grad, state, group, is_late):
        state["v"].add_(grad, alpha=0.5)
        if is_late:
            state["m"], state["v"] = state["v"], state["m"]


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
    assert counts or played(traced._cohorts[0]) > STEPS / 2


def test_an_object_in_a_list_of_the_optimizer_is_written_once():
    class InAList(Replayed):
        def __init__(self, params):
            super().__init__(params)
            self.counters = [(Counter(),)]

        def later(self, p, grad, state, group, is_late):
            if is_late:
                p.sub_(grad, alpha=0.01 * self.counters[0][0].more())

    traced = compare(InAList, "forward", ((31,),))
    assert not traced.untraced and learned(traced._cohorts[0]) == 0


@pytest.mark.parametrize("make", TWICE)
def test_a_step_that_may_leave_something_twice_is_not_run_twice(make):
    traced = compare(make, "forward", ((31,),))
    assert not traced.untraced and learned(traced._cohorts[0]) == 0


@pytest.mark.parametrize("count", ELSEWHERE)
def test_a_step_that_counts_elsewhere_is_not_run_twice(count):
    traced = compare(lambda params: from_0(count)(params), "forward", ((31,),))
    assert not traced.untraced and learned(traced._cohorts[0]) == 0


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
    assert played(link_of(ours).traced._cohorts[0]) < 20
