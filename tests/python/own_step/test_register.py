# SPDX-License-Identifier: BSD-3-Clause
"""register(): what is promised with it is tried, and what breaks it is refused."""

import pytest
import torch
from common import assert_same, everything, net, refused, same, train, weights
from own_classes import (
    ByPosition,
    Cached,
    ClipsAbove,
    CounterOfFirst,
    CountsSteps,
    CountsUpdates,
    CouplesHalves,
    CouplesLarge,
    Decaying,
    Drawing,
    EveryFifth,
    EveryTwentieth,
    Flaky,
    GlobalNorm,
    KeysOfFirst,
    Listed,
    MeanWeight,
    Noisy,
    OptionsInAttribute,
    RateOfFirst,
    Searching,
    Skips,
    Tensors,
    WarnsOnce,
)
from own_scripts import MODES, training
from torch import nn
from torch.optim import Adafactor

import optfuse


def large():
    """Two of its parameters have more than 4,096 elements."""
    return nn.Sequential(nn.Linear(6, 800), nn.Tanh(), nn.Linear(800, 8), nn.Linear(8, 3))


def halves():
    """Two dtypes in one optimizer, the rarer one last."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=i % 2 == 0) for i in range(6)))
    return model.append(nn.Linear(4, 4).bfloat16())


BUILT = {CouplesLarge: large, CouplesHalves: halves}
OF_OTHERS = "independently: the gradients of other parameters: after"
OF_NUMBERS = "independently: how many parameters have a gradient: it changes"
REFUSED = {
    GlobalNorm: f"{OF_OTHERS} step",
    Noisy: "independently: random numbers in step(): after step",
    Drawing: "independently: random numbers of its own, or a clock, in step(): after step",
    ByPosition: "independently: an attribute read by position (rates): after step",
    OptionsInAttribute: f"{OF_OTHERS} step",
    KeysOfFirst: "independently: keys of another parameter's state: ",
    CounterOfFirst: "independently: the state of other parameters: after step",
    MeanWeight: "independently: the values of other parameters: after step",
    Listed: "its attribute 'all' holds parameters",
    ClipsAbove: f"{OF_OTHERS} step 21 with gradients 100",
    EveryFifth: f"{OF_OTHERS} step",
    EveryTwentieth: f"{OF_OTHERS} step 20",
    CouplesLarge: OF_OTHERS,
    CouplesHalves: OF_OTHERS,
    Skips: f"{OF_OTHERS} step 2 with gradients first inf",
    Decaying: "independently: updates of parameters without a gradient: after step",
    CountsUpdates: f"{OF_NUMBERS} the option 'updates' of group 0",
    CountsSteps: f"{OF_NUMBERS} the option 't' of group 0",
    Cached: "the option 'buffer' of group 0",
    WarnsOnce: f"{OF_NUMBERS} the optimizer's attribute 'warned'",
}


@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_a_promise_that_is_not_kept_is_refused(cls):
    words = REFUSED[cls]
    optfuse.register(cls)
    model = BUILT.get(cls, net)()
    before = weights(model)
    optimizer = cls(model.parameters())
    random = torch.get_rng_state()
    try:
        refused(lambda: optfuse.fuse(optimizer), words, way_out="as it is")
    finally:
        optfuse.register(cls, per_parameter=False)
    assert type(optimizer) is cls and not optimizer.state
    assert_same("weights", weights(model), before)
    assert torch.equal(torch.get_rng_state(), random), "the trial drew random numbers"


def test_one_parameter_is_no_way_around_the_trial():
    optfuse.register(GlobalNorm)
    try:
        optimizer = GlobalNorm([nn.Parameter(torch.ones(3))])
        refused(lambda: optfuse.fuse(optimizer), "differs", way_out="as it is")
    finally:
        optfuse.register(GlobalNorm, per_parameter=False)


def test_the_rate_of_another_group_is_refused():
    optfuse.register(RateOfFirst)
    try:
        first, *others = net().parameters()
        optimizer = RateOfFirst([{"params": [first]}, {"params": others}])
        refused(lambda: optfuse.fuse(optimizer), "independently", way_out="as it is")
    finally:
        optfuse.register(RateOfFirst, per_parameter=False)


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_a_learning_rate_of_zero_hides_nothing(rate):
    """As a scheduler sets it that warms up."""
    optfuse.register(GlobalNorm)
    try:
        optimizer = GlobalNorm(net().parameters(), lr=rate)
        refused(lambda: optfuse.fuse(optimizer), "differs", way_out="as it is")
    finally:
        optfuse.register(GlobalNorm, per_parameter=False)


def test_a_verdict_is_for_what_was_tried():
    """Other attributes, options and state may make another class of it."""

    class Switched(Tensors):
        coupled = False

        def __init__(self, params):
            super().__init__(params)
            self.level = 0

        @torch.no_grad()
        def step(self, closure=None):
            params = [p for group in self.param_groups for p in group["params"]]
            if self.level == 1 or any(self.state[p].get("n") == 7 for p in params):
                total = sum(p.grad.sum() for p in params if p.grad is not None)
                for p in params:
                    p.sub_(total) if p.grad is not None else None
            super().step(closure)

        def update(self, group, p, state):
            p.sub_(p.grad, alpha=group["lr"])

    optfuse.register(Switched)
    optfuse.fuse(Switched(net().parameters()))
    by_attribute = Switched(net().parameters())
    by_attribute.level = 1
    by_state = Switched(net().parameters())
    by_state.state[by_state.param_groups[0]["params"][0]]["n"] = 7
    for optimizer in (by_attribute, by_state):
        refused(lambda: optfuse.fuse(optimizer), "differs", way_out="as it is")  # noqa: B023


def test_a_class_that_raises_for_a_gradient_is_taken_if_it_does_so_for_that_one_alone():
    optfuse.fuse(Flaky(net().parameters()))

    class Together(Flaky):
        """Raises for the sum of all."""

        @torch.no_grad()
        def step(self, closure=None):
            gradients = [p.grad for g in self.param_groups for p in g["params"]]
            if sum(g.double().abs().sum() for g in gradients if g is not None) > 1e4:
                raise ValueError("too much")
            super().step(closure)

        def update(self, group, p, state):
            p.sub_(p.grad.sign(), alpha=group["lr"])

    optfuse.register(Together)
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(30)))
    optimizer = Together(model.parameters())
    optfuse.fuse(optimizer)  # each of them is too much, too


@pytest.mark.parametrize("error", [KeyError("m"), AttributeError("m"), ZeroDivisionError()])
def test_a_trial_that_fails_says_what_it_did(error):
    class Failing(Tensors):
        def update(self, group, p, state):
            super().update(group, p, state)
            if state["t"] == 3:
                raise error

    optfuse.register(Failing)
    optimizer = Failing(net().parameters())
    words = "small copies", "took step 3 of all", type(error).__name__
    refused(lambda: optfuse.fuse(optimizer), *words, way_out="as it is")
    assert not optimizer.state


def test_what_can_not_be_copied_is_named():
    import threading

    class Locked(Tensors):
        def __init__(self, params):
            super().__init__(params)
            self.lock = threading.Lock()

    optfuse.register(Locked)
    optimizer = Locked(net().parameters())
    refused(lambda: optfuse.fuse(optimizer), "can't be copied", "lock", way_out="as it is")


def test_the_trial_takes_over_options_and_state():
    """Fused in the middle of training, from the state that is there."""

    def script(wrap):
        model = net()
        optimizer = Tensors(model.parameters())
        for i in range(3):
            train(model, optimizer, i)
        optimizer = wrap(optimizer)
        for i in range(3, 8):
            train(model, optimizer, i)
        yield from everything(model, optimizer)

    same(script)


def test_unknown_classes_are_refused_and_told_of_register():
    """Those that can't be traced."""

    class Unknown(Tensors):
        def update(self, group, p, state):
            p.grad.mul_(0.5 if p.grad.norm().item() > 1 else 1.0)
            super().update(group, p, state)

    class Derived(torch.optim.AdamW):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None and p.grad.norm().item() > 1:
                        p.grad.mul_(0.5)
            return super().step(closure)

    for cls in (Unknown, Derived):
        optimizer = cls(net().parameters())
        refused(lambda: optfuse.fuse(optimizer), cls.__name__, way_out="optfuse.register")  # noqa: B023
        optfuse.register(cls)
        optfuse.unfuse(optfuse.fuse(optimizer))
        optfuse.register(cls, per_parameter=False)
        refused(lambda: optfuse.fuse(optimizer), cls.__name__, way_out="optfuse.register")  # noqa: B023


@pytest.mark.parametrize("mode", MODES)
def test_a_subclass_of_a_class_with_kernels_runs_its_own_step(mode):
    class Lucky(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.mul_(0.99)
            return super().step(closure)

    optfuse.register(Lucky)
    same(training(Lucky, steps=6), mode)


def test_what_register_does_not_take():
    refused(lambda: optfuse.register(Searching), "closure", way_out="as it is")
    refused(lambda: optfuse.register(3), "Optimizer", way_out="register()")
    lbfgs = torch.optim.LBFGS(net().parameters())
    refused(lambda: optfuse.fuse(lbfgs), "LBFGS", way_out="as it is")
    sparse = torch.optim.SparseAdam(net().parameters())
    refused(lambda: optfuse.fuse(sparse), "sparse gradients", way_out="as it is")


def test_adafactor_with_its_default_epsilon_needs_one_dtype_a_group():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.float64))
    refused(lambda: optfuse.fuse(Adafactor([p, q])), "dtypes differ", way_out="group for each")
    optfuse.fuse(Adafactor([p, q], eps=(1e-8, 1e-3)))
