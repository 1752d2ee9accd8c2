# SPDX-License-Identifier: BSD-3-Clause
"""Effects of a later step() beside those of its operators are seen, and come once: tensors that it
keeps, attributes that it sets, lists that it fills, counts elsewhere."""

import itertools
import random

import pytest
import torch
from traced_classes import Base

import optfuse
from optfuse._link import link_of

STEPS, LATER = 70, 50  # the longest run of a trial has 21 steps


class Later(Base):
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


class Keeps(Later):
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


class Notes(Later):
    """It gives the parameter an attribute."""

    def later(self, p, grad, state, group, is_late):
        if is_late:
            p.note = 1
        p.sub_(grad, alpha=0.01)


class Option(Later):
    def later(self, p, grad, state, group, is_late):
        if is_late:
            group["eps"] = 0.5
        p.sub_(grad, alpha=group["eps"])


class Exchanged(Later):
    """From a step on an entry has the tensor that another one had."""

    def later(self, p, grad, state, group, is_late):
        state["v"].add_(grad, alpha=0.5)
        if is_late:
            state["m"], state["v"] = state["v"], state["m"]


class DropsGradient(Later):
    def later(self, p, grad, state, group, is_late):
        p.sub_(grad, alpha=0.01)
        if is_late:
            p.grad = None


class Forgets(Later):
    def later(self, p, grad, state, group, is_late):
        if "v" not in state:
            state["v"] = torch.zeros_like(p)
        p.sub_(state["v"].add_(grad), alpha=0.01)
        if is_late:
            del state["v"]


class TurnsGradientsOn(Later):
    def later(self, p, grad, state, group, is_late):
        p.sub_(grad, alpha=0.01)
        if is_late:
            state["v"].requires_grad_(True)


class TurnsGradientsOfNewStateOn(Later):
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


class Draws(Later):
    def later(self, p, grad, state, group, is_late):
        if is_late:
            p.sub_(grad, alpha=0.01 * random.random())


class Appends(Later):
    def __init__(self, params):
        super().__init__(params)
        self.seen = []

    def later(self, p, grad, state, group, is_late):
        if is_late:
            self.seen.append(state["n"])
            p.sub_(grad, alpha=0.01 * len(self.seen))


class AppendsToObjects(Appends):
    def __init__(self, params):
        super().__init__(params)
        self.seen = [Slotted()]


class Slotted:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0

    def __repr__(self):
        return f"{self.n}"


class CountsInAnOption(Later):
    def __init__(self, params):
        super().__init__(params, counter=Slotted())

    def later(self, p, grad, state, group, is_late):
        if is_late:
            group["counter"].n += 1
            p.sub_(grad, alpha=0.01 * group["counter"].n)


class CountsInAnAttribute(Later):
    def __init__(self, params):
        super().__init__(params)
        self.counter = Slotted()

    def later(self, p, grad, state, group, is_late):
        if is_late:
            self.counter.n += 1
            p.sub_(grad, alpha=0.01 * self.counter.n)


class TakesFromAnAttribute(Later):
    def __init__(self, params):
        super().__init__(params)
        self.numbers = itertools.count(1)

    def later(self, p, grad, state, group, is_late):
        if is_late:
            p.sub_(grad, alpha=0.01 * next(self.numbers))


COUNTED = [0]


class CountsInAGlobal(Later):
    def __init__(self, params):
        super().__init__(params)
        COUNTED[0] = 0

    def later(self, p, grad, state, group, is_late):
        if is_late:
            COUNTED[0] += 1
            p.sub_(grad, alpha=0.01 * COUNTED[0])


ELSEWHERE = (Draws, CountsInAnOption, CountsInAnAttribute, TakesFromAnAttribute, CountsInAGlobal)


class FillsAnOption(Later):
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


@pytest.mark.parametrize("make", (Appends, AppendsToObjects))
def test_a_list_of_the_optimizer_that_a_late_step_fills_is_filled_once(make):
    theirs, _ = trained(make, None, ((31,),))
    ours, _ = trained(make, "forward", ((31,),))
    late = list(range(LATER + 1, STEPS + 1))
    assert ours.seen[-len(late) :] == theirs.seen[-len(late) :] == late
    assert len(ours.seen) == len(theirs.seen)
    compare(make, "forward", ((31,),))
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
def test_defaults_are_read_and_written_once(counts):
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


def test_an_object_in_a_list_of_the_optimizer_is_written_once():
    class InAList(Later):
        def __init__(self, params):
            super().__init__(params)
            self.counters = [(Slotted(),)]

        def later(self, p, grad, state, group, is_late):
            if is_late:
                self.counters[0][0].n += 1
                p.sub_(grad, alpha=0.01 * self.counters[0][0].n)

    traced = compare(InAList, "forward", ((31,),))
    assert not traced.untraced


@pytest.mark.parametrize("make", ELSEWHERE)
def test_what_a_step_leaves_elsewhere_is_left_once(make):
    traced = compare(make, "forward", ((31,),))
    assert not traced.untraced
