# SPDX-License-Identifier: BSD-3-Clause
"""register(): in backward mode the class's own step() runs on one parameter at a time, and has
stock's bits; what breaks the promise raises, as far as it can be seen."""

import copy
import threading

import pytest
import torch
from common import everything, loss_of, net, refused, same, train
from own_classes import (
    Abstract,
    Cached,
    Counter,
    CounterInState,
    CountsSteps,
    CountsUpdates,
    Decaying,
    Flaky,
    GroupCounter,
    InDicts,
    Interrupted,
    NestedCounter,
    NewTensors,
    Numbers,
    Searching,
    Stateless,
    Tensors,
    WarnsOnce,
)
from scripts import trained
from torch import nn

import optfuse


class Looks(Tensors):
    """Needs a number of its gradient."""

    def update(self, group, p, state):
        state["n"] = max(state.get("n", 0.0), p.grad.norm().item())
        p.sub_(p.grad, alpha=group["lr"] / (1 + state["n"]))


class MakesAll(Tensors):
    """Makes the state of all parameters at the first step."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("m", torch.zeros_like(p))
                if p.grad is not None:
                    p.sub_(self.state[p]["m"].lerp_(p.grad, 0.1), alpha=group["lr"])


KEEPS = [Abstract, Tensors, Numbers, NewTensors, InDicts, Stateless, Flaky, Looks]
BREAKS = {
    CountsUpdates: "the option 'updates' of group 0",
    CountsSteps: "the option 't' of group 0",
    GroupCounter: "the option 't' of group 0",
    NestedCounter: "the option 'log' of group 0",
    Cached: "the option 'buffer' of group 0",
    WarnsOnce: "the attribute 'warned'",
    Counter: "the attribute 't'",
    CounterInState: "the state of another parameter",
    MakesAll: "the state of another parameter",
    Decaying: "was written since this backward pass began",
}


@pytest.fixture(autouse=True)
def registered():
    classes = *KEEPS, *BREAKS, Interrupted, Logging, Busy, Odd
    for cls in classes:
        optfuse.register(cls)
    yield
    for cls in classes:
        optfuse.register(cls, per_parameter=False)


def training(make, **more):
    def between(model, optimizer, i):
        if i % 5 == 3:
            yield from everything(model, optimizer)

    return trained(make, net, between=between, steps=12, pending=False, **more)


@pytest.mark.parametrize("cls", KEEPS, ids=lambda cls: cls.__name__)
def test_bits_are_those_of_stock(cls, python_updates):
    same(training(cls), "backward")
    assert sorted(python_updates) == sorted(12 * [*range(6)])


@pytest.mark.parametrize("cls", [*KEEPS, *BREAKS], ids=lambda cls: cls.__name__)
def test_forward_mode_has_nothing_of_it(cls, python_updates):
    same(training(cls), prove=False)
    assert not python_updates
    assert "recorded" in optfuse.explain(optfuse.fuse(cls(net().parameters())))


@pytest.mark.parametrize("cls", BREAKS, ids=lambda cls: cls.__name__)
def test_a_promise_that_is_not_kept_raises(cls):
    model = net()
    optimizer = optfuse.fuse(cls(model.parameters()), "backward")

    def some():
        for i in range(3):
            train(model, optimizer, i)

    refused(some, BREAKS[cls], "of group 0", way_out="optfuse.register()")


def test_gradients_are_freed_in_backward():
    model = net()
    optimizer = optfuse.fuse(Looks(model.parameters()), "backward")
    loss_of(model, 0).backward()
    assert all(torch.ops.optfuse.are_consumed([p.grad for p in model.parameters()]))
    refused(lambda: model[0].weight.grad + 1)
    optimizer.step()


class Logging(Tensors):
    """Notes outside of the optimizer which gradients its steps have seen."""

    seen = []

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        self.seen.append([i for i, p in enumerate(params) if p.grad is not None])
        for p in params:
            if p.grad is not None:
                self.update(self.param_groups[0], p, self.state[p])


def test_what_comes_late_gets_one_step():
    """Memory that others have a look at is updated in step()."""

    def script(wrap):
        model = net()
        optimizer, hooks = wrap(Logging(model.parameters())), []
        optimizer.register_step_pre_hook(lambda *_: hooks.append("before"))
        optimizer.register_step_post_hook(lambda *_: hooks.append("after"))
        for i in range(4):
            optimizer.zero_grad()
            seen_by_others = [p.data for p in (model[0].weight, model[2].bias)[: i % 3]]
            loss_of(model, i).backward()
            Logging.seen.clear()
            optimizer.step()
            late = [[0, 3][: i % 3]]
            assert not wrap.fused or Logging.seen == (late if seen_by_others else [])
            del seen_by_others
            yield "hooks", hooks
            yield from everything(model, optimizer)

    same(script, "backward")


LATE = {
    "option": lambda o, p: o.param_groups[0].update(lr=0.5),
    "attribute": lambda o, p: setattr(o, "update", lambda *_: None),
    "state": lambda o, p: o.state[p]["m"].mul_(2),
    "entry": lambda o, p: o.state[p].update(m=torch.zeros_like(p)),
    "parameter": lambda o, p: p.mul_(2),
}


@pytest.mark.parametrize("name", LATE)
def test_changes_between_backward_and_step_raise(name):
    model = net()
    optimizer = optfuse.fuse(Tensors(model.parameters()), "backward")
    train(model, optimizer, 0)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    with torch.no_grad():
        LATE[name](optimizer, model[0].weight)
    refused(optimizer.step)
    optimizer.step()


class Odd(Tensors):
    """Raises what takes more than a text."""

    class Wrong(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} and {b}")

    def update(self, group, p, state):
        raise self.Wrong("this", "that")


def test_exceptions_of_the_class_come_out_of_backward():
    model = net()
    optimizer = optfuse.fuse(Flaky(model.parameters()), "backward")
    with pytest.raises(ValueError, match="^a gradient is not finite$"):
        (loss_of(model, 0) * float("inf")).backward()
    refused(optimizer.step, "ValueError: a gradient is not finite", way_out="checkpoint")
    optfuse.fuse(Odd(net().parameters()), "backward")
    model = net()
    optimizer = optfuse.fuse(Odd(model.parameters()), "backward")
    refused(loss_of(model, 0).backward, "Wrong: this and that", way_out="parameter 5")


def test_an_interrupt_stays_one():
    model = net()
    optimizer = optfuse.fuse(Interrupted(model.parameters()), "backward")
    for i in range(2):
        train(model, optimizer, i)
    optimizer.zero_grad()
    with pytest.raises(KeyboardInterrupt):
        loss_of(model, 2).backward()


class Busy(Tensors):
    """Notes how many of its steps run at a time."""

    running, most = 0, 0

    @torch.no_grad()
    def step(self, closure=None):
        Busy.running += 1
        Busy.most = max(Busy.most, Busy.running)
        super().step(closure)
        threading.Event().wait(0.001)
        Busy.running -= 1


def test_one_step_at_a_time():
    params = [nn.Parameter(torch.ones(4)) for _ in range(20)]
    optimizer = optfuse.fuse(Busy(params), "backward")
    halves = params[:10], params[10:]
    for i in range(3):
        threads = [
            threading.Thread(target=lambda half=half: sum((p * p).sum() for p in half).backward())
            for half in halves
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        optimizer.step()
        optimizer.zero_grad()
        assert all(optimizer.state[p]["t"] == i + 1 for p in params)
    assert Busy.most == 1
    assert all(torch.equal(p, params[0]) for p in params)


def test_groups_checkpoints_and_copies(python_updates):
    def script(wrap):
        model, more = net(), nn.Linear(3, 3)
        optimizer = wrap(Tensors(model.parameters()))
        both = nn.Sequential(model, more)
        for i in range(9):
            train(both, optimizer, i)
            if i == 2:
                optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.1})
            if i == 4:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if i == 6:
                both, optimizer = copy.deepcopy((both, optimizer))
        yield from everything(both, optimizer)

    same(script, "backward", prove=False)
    assert len(python_updates) == 3 * 6 + 6 * 8


def test_explain_names_loops_over_many_parameters():
    class Loops(Tensors):
        def update(self, group, p, state):
            p.sub_(p.grad)

    optfuse.register(Loops)
    for n, is_named in ((1000, True), (2, False)):
        params = [nn.Parameter(torch.ones(1)) for _ in range(n)]
        optimizer = optfuse.fuse(Loops(params), "backward")
        sum(p.sum() for p in params).backward()
        optimizer.step()
        text = optfuse.explain(optimizer)
        assert f"ran on {n} gradients" in text
        assert ("looked at 999 other parameters" in text) is is_named, text
    assert optfuse.summary(optimizer).isa == {"float32": "own step()"}


def test_what_register_does_not_take():
    refused(lambda: optfuse.register(Searching), "closure", way_out="Leave register() out")
    refused(lambda: optfuse.register(3), "Optimizer", way_out="register()")
