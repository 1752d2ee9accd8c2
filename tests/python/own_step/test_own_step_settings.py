# SPDX-License-Identifier: BSD-3-Clause
"""Options and attributes that a class's own step() changes in the same way for all of its
parameters: they advance once a step, at step(), as in stock."""

import copy
import pickle

import pytest
import torch
from common import everything, loss_of, net, refused, same, train
from own_classes import (
    Averaging,
    Counter,
    CounterInState,
    GroupCounter,
    NestedCounter,
    SetOnce,
    Tensors,
)
from own_scripts import MODES
from scripts import trained

import optfuse

CLASSES = (Averaging, Counter, CounterInState, GroupCounter, NestedCounter, SetOnce)
for cls in CLASSES:
    optfuse.register(cls)


def made(cls, params):
    optimizer = cls(params)
    optimizer.train() if cls is Averaging else None
    return optimizer


def shown(model, optimizer):
    """Attributes, too."""
    own = {k: v for k, v in vars(optimizer).items() if k in ("t", "ready", "scale")}
    yield "attributes", own
    yield from everything(model, optimizer)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_they_are_stocks_after_every_step(cls, mode):
    def between(model, optimizer, i):
        yield from shown(model, optimizer)

    script = trained(lambda p: made(cls, p), between=between, steps=8, pending=False)
    same(script, mode, prove=False)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_updates_that_wait_use_those_of_their_own_step(cls):
    """Without a look at the state, which would launch them."""

    def script(wrap):
        model = net()
        optimizer = wrap(made(cls, model.parameters()))
        for i in range(6):
            train(model, optimizer, i)
            if cls is not NestedCounter and i > 1:
                wrap.pending()
            yield "group", {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        yield from shown(model, optimizer)

    same(script)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_step_in_which_no_parameter_has_a_gradient_advances_them(cls, mode):
    def iteration(model, optimizer, i):
        if i % 2:
            train(model, optimizer, i)
        else:
            optimizer.zero_grad()
            optimizer.step()
        yield from shown(model, optimizer)

    same(trained(lambda p: made(cls, p), iteration=iteration), mode, prove=False)


@pytest.mark.parametrize("mode", MODES)
def test_groups_of_their_own_and_some_without_gradients(mode):
    def start(wrap):
        model = net()
        layers = [{"params": list(m.parameters())} for m in model if list(m.parameters())]
        optimizer = wrap(GroupCounter(layers))
        return model, optimizer

    def iteration(model, optimizer, i):
        optimizer.zero_grad()
        part = model[2:] if i % 3 == 2 else model
        part(torch.ones(2, 8 if i % 3 == 2 else 6)).sum().backward()
        optimizer.step()
        yield from shown(model, optimizer)

    same(trained(start=start, iteration=iteration), mode, prove=False)


def test_a_step_that_the_scaler_skips_advances_nothing():
    def script(wrap):
        model = net()
        optimizer = wrap(GroupCounter(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for i in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, i)).backward()
            if i == 2:
                model[0].weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            yield from shown(model, optimizer)

    same(script)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", [Averaging, GroupCounter, NestedCounter], ids=lambda c: c.__name__)
def test_checkpoints_copies_and_pickles_go_on_counting(cls, mode):
    """The counts are options; PyTorch copies and pickles no other attributes."""

    def script(wrap):
        model = net()
        optimizer = wrap(made(cls, model.parameters()))
        for i in range(3):
            train(model, optimizer, i)
        model2, optimizer2 = copy.deepcopy((model, optimizer))
        model3, optimizer3 = pickle.loads(pickle.dumps((model, optimizer)))
        optimizer3 = wrap(optimizer3)
        model4 = net()
        optimizer4 = wrap(made(cls, model4.parameters()))
        model4.load_state_dict(model.state_dict())
        optimizer4.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizers = (optimizer, optimizer2, optimizer3, optimizer4)
        for pair in zip((model, model2, model3, model4), optimizers, strict=True):
            for i in range(3, 6):
                train(*pair, i)
            yield from shown(*pair)

    same(script, mode, prove=False)


@pytest.mark.parametrize("mode", MODES)
def test_a_scheduler_and_then_another_group(mode):
    def script(wrap):
        model = net()
        optimizer = wrap(GroupCounter(model[0].parameters()))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
        for i in range(6):
            train(model, optimizer, i)
            if i < 2:
                scheduler.step()
            if i == 2:
                optimizer.add_param_group({"params": list(model[2].parameters())})
            yield from shown(model, optimizer)

    same(script, mode, prove=False)


@pytest.mark.parametrize("mode", MODES)
def test_modes_to_train_and_to_evaluate_in(mode):
    def iteration(model, optimizer, i):
        optimizer.train()
        train(model, optimizer, i)
        if i % 3 == 2:
            optimizer.eval()
            yield "loss", loss_of(model, 0)
            yield from shown(model, optimizer)

    same(trained(Averaging, iteration=iteration, steps=9), mode, prove=False)


@pytest.mark.parametrize("mode", MODES)
def test_what_step_raises_without_a_gradient_is_stocks_error(mode):
    model = net()
    optimizer = optfuse.fuse(Averaging(model.parameters()), mode=mode)
    with pytest.raises(RuntimeError, match="train\\(\\) first"):
        optimizer.step()
    optimizer.train()
    train(model, optimizer, 0)


class Late(Tensors):
    """Counts in the group, and from its 30th step on does more."""

    kind = "option"

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["t"] = group.get("t", 0) + 1
            if group["t"] == 30:
                if self.kind == "option":
                    group["lr"] = 0.5
                elif self.kind == "attribute":
                    self.late = True
                else:
                    group["t"] += sum(p.numel() for p in group["params"])
        super().step(closure)


@pytest.mark.parametrize("kind", ["option", "attribute", "counter"])
@pytest.mark.parametrize("mode", MODES)
def test_a_change_that_comes_after_the_trial_is_not_lost_in_silence(mode, kind, monkeypatch):
    monkeypatch.setattr(Late, "kind", kind)
    optfuse.register(Late)
    model = net()
    optimizer = optfuse.fuse(Late(model.parameters()), mode=mode)

    def on():
        for i in range(31):
            train(model, optimizer, i)
        optfuse.flush(optimizer)

    name = {"option": "'lr'", "attribute": "'late'", "counter": "'t'"}[kind]
    refused(on, name, "as it did not when fuse() tried it", way_out="checkpoint")


class LateUpdate(Tensors):
    """From the 30th update of a parameter on does more; until then it changes nothing."""

    kind = "option"

    def update(self, group, p, state):
        super().update(group, p, state)
        if state["t"] == 30 and self.kind == "option":
            group["late"] = 1
        elif state["t"] == 30:
            self.late = 1


@pytest.mark.parametrize("kind", ["option", "attribute"])
@pytest.mark.parametrize("mode", MODES)
def test_nor_is_the_first_change_of_all(mode, kind, monkeypatch):
    monkeypatch.setattr(LateUpdate, "kind", kind)
    optfuse.register(LateUpdate)
    model = net()
    optimizer = optfuse.fuse(LateUpdate(model.parameters()), mode=mode)

    def on():
        for i in range(31):
            train(model, optimizer, i)
        optfuse.flush(optimizer)

    refused(on, "'late'", "as it did not when fuse() tried it", way_out="checkpoint")


class Shared(Tensors):
    """Several places hold one object, and its step() writes into it."""

    def __init__(self, params, place="options"):
        super().__init__(params)
        self.place, self.log = place, [0]
        for group in self.param_groups:
            group["log"] = self.log if place == "attribute" else [0]
        if place == "options":
            self.param_groups[1]["log"] = self.param_groups[0]["log"]
        self.t = torch.zeros(())
        if place == "state":
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["t"] = self.t

    @torch.no_grad()
    def step(self, closure=None):
        self.t += 1
        for group in self.param_groups:
            group["log"][0] += 1
            for p in group["params"]:
                if p.grad is not None:
                    t = self.state[p].get("t", 1) if self.place == "state" else 1
                    p.sub_(p.grad, alpha=group["lr"] / (group["log"][0] + float(t)))


@pytest.mark.parametrize("place", ["options", "attribute", "state"])
def test_an_object_in_two_places_that_it_writes_into_is_refused(place):
    optfuse.register(Shared)
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = Shared(groups, place)
    refused(lambda: optfuse.fuse(optimizer), "share", way_out="one of its own")


class Written(Tensors):
    """Writes into a list, a dict and a tensor."""

    def __init__(self, params):
        super().__init__(params)
        self.history, self.parts = [0], {"inner": [0]}
        for group in self.param_groups:
            group["count"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        self.history.append(len(self.history))
        self.parts["inner"][0] += 1
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    scale = len(self.history) + self.parts["inner"][0] + float(group["count"])
                    p.sub_(p.grad, alpha=group["lr"] / scale)


@pytest.mark.parametrize("mode", MODES)
def test_what_it_writes_into_stays_the_object_that_others_hold(mode):
    optfuse.register(Written)

    def script(wrap):
        model = net()
        optimizer = Written(model.parameters())
        history, inner = optimizer.history, optimizer.parts["inner"]
        count = optimizer.param_groups[0]["count"]
        optimizer = wrap(optimizer)
        for i in range(4):
            train(model, optimizer, i)
        yield "held", (history, inner, count)
        yield from everything(model, optimizer)

    same(script, mode, prove=False)


class Meter:
    n = 0


class Metered(Tensors):
    """Writes into an object of a class of its own."""

    def __init__(self, params):
        super().__init__(params)
        self.meter = Meter()

    @torch.no_grad()
    def step(self, closure=None):
        self.meter.n += 1
        super().step(closure)


def test_other_objects_that_it_writes_into_are_refused():
    optfuse.register(Metered)
    refused(lambda: optfuse.fuse(Metered(net().parameters())), "Meter", way_out="as it is")
