# SPDX-License-Identifier: BSD-3-Clause
"""A class's own step() and everything else that belongs to an optimizer: options,
schedulers, state, copies, groups, hooks and closures."""

import copy
import pickle

import pytest
import torch
from common import everything, fused_backward, loss_of, net, refused, same, train
from own_classes import Numbers, Tensors
from own_scripts import MODES, momentum
from scripts import trained
from torch.optim import Adafactor
from torch.optim.optimizer import register_optimizer_step_post_hook

import optfuse


@pytest.mark.parametrize("make", [Adafactor, momentum, Numbers])
def test_options_are_those_of_the_step(make):
    def script(wrap):
        model = net()
        optimizer = wrap(
            make(model.parameters(), lr=torch.tensor(0.1))
            if make is Adafactor
            else make(model.parameters())
        )
        for i in range(6):
            train(model, optimizer, i)
            for group in optimizer.param_groups:
                group["lr"] *= 0.5  # a tensor is changed in place
        yield from everything(model, optimizer)

    same(script, prove=make is not Numbers)


def halve(rate):
    rate.mul_(0.5)


def halve_data(rate):
    rate.data.mul_(0.5)


def halve_by_numpy(rate):
    rate.numpy()[...] *= 0.5


CHANGES = [halve, halve_data, halve_by_numpy]


@pytest.mark.parametrize("change", CHANGES)
def test_a_rate_that_is_a_tensor_changed_before_step(change):
    def before_step(model, optimizer, i):
        change(optimizer.param_groups[0]["lr"])

    same(
        trained(lambda p: Tensors(p, lr=torch.tensor(0.1)), before_step=before_step, pending=False)
    )


@pytest.mark.parametrize("change", CHANGES)
def test_a_rate_that_is_a_tensor_changed_after_backward_is_refused_in_backward_mode(change):
    model = net()
    optimizer = optfuse.fuse(Tensors(model.parameters(), lr=torch.tensor(0.1)), mode="backward")
    train(model, optimizer, 0)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    change(optimizer.param_groups[0]["lr"])
    refused(optimizer.step, "between backward() and step()")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", (Tensors, Numbers))
def test_state_that_is_cleared_before_each_step(make, mode):
    """With gradients set by hand, so that step() updates in both modes."""

    def iteration(model, optimizer, i):
        optimizer.state.clear()
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.1 + i)
        optimizer.step()
        yield from everything(model, optimizer)

    same(trained(make, iteration=iteration), mode, prove=False)


@pytest.mark.parametrize("mode", MODES)
def test_schedulers(mode):
    def script(wrap):
        model = net()
        optimizer = Tensors(model.parameters(), lr=0.1)
        early = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        optimizer = wrap(optimizer)
        late = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
        for i in range(8):
            train(model, optimizer, i)
            (early if i % 2 else late).step()
            yield "lr", optimizer.param_groups[0]["lr"]
        yield from everything(model, optimizer)

    same(script, mode)


class WritesBack(Tensors):
    """Its learning rate times a number that is 1, as Pyro's ClippedAdam has it."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] *= 1.0
        return super().step(closure)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_groups", [1, 2])
@pytest.mark.parametrize("is_scheduled", [False, True])
def test_an_option_written_back_with_an_equal_value_is_no_change(is_scheduled, n_groups, mode):
    def script(wrap):
        model = net()
        params = list(model.parameters())
        groups = [{"params": params}] if n_groups == 1 else [{"params": [p]} for p in params]
        optimizer = wrap(WritesBack(groups, lr=1e-3))
        warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1, (i + 1) / 5))
        for i in range(7):
            train(model, optimizer, i)
            if is_scheduled:
                warm.step()
            yield "lr", [group["lr"] for group in optimizer.param_groups]
        yield from everything(model, optimizer)

    optfuse.register(WritesBack)
    same(script, mode)


def test_a_change_of_options_after_backward_is_refused():
    model, optimizer = fused_backward(Adafactor)
    loss_of(model, 0).backward()
    optimizer.param_groups[0]["d"] = 2.0
    refused(optimizer.step, "option 'd' of parameter 0 of group 0")


@pytest.mark.parametrize("act", ["read", "zero", "hold", "replace", "reload", "save"])
def test_state_while_an_update_is_pending(act):
    def script(wrap):
        model = net()
        optimizer = wrap(Tensors(model.parameters()))
        first = model[0].weight
        train(model, optimizer, 0)
        entry = optimizer.state[first]
        held = entry["m"] if act == "hold" else None
        kept = copy.deepcopy(optimizer.state_dict())
        for i in range(4):
            train(model, optimizer, i)
            if act != "hold" or i == 0:
                wrap.pending()
            if act == "read":
                yield "momentum", optimizer.state[first]["m"]
            elif act == "zero":
                optimizer.state[first]["m"].zero_()
            elif act == "hold":
                yield "momentum", held
            elif act == "replace":
                optimizer.state[first] = {"t": torch.ones(()), "m": torch.ones_like(first)}
            elif act == "reload":
                optimizer.load_state_dict(kept)
            else:
                yield "saved", optimizer.state_dict()
        yield from everything(model, optimizer)

    same(script)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [Adafactor, momentum, Numbers])
def test_resume_from_a_checkpoint(make, mode):
    def script(wrap):
        model = net()
        optimizer = wrap(make(model.parameters()))
        for i in range(5):
            train(model, optimizer, i)
        saved = pickle.dumps((model.state_dict(), optimizer.state_dict()))
        again = net()
        resumed = wrap(make(again.parameters()))
        for target, state in zip((again, resumed), pickle.loads(saved), strict=True):
            target.load_state_dict(state)
        for i in range(5, 10):
            train(again, resumed, i)
        yield from everything(again, resumed)

    same(script, mode, prove=make is not Numbers)


@pytest.mark.parametrize("mode", MODES)
def test_copies_pickles_and_unfuse(mode):
    def script(wrap):
        model = net()
        optimizer = wrap(Tensors(model.parameters()))
        for i in range(3):
            train(model, optimizer, i)
        model2, optimizer2 = copy.deepcopy((model, optimizer))
        optimizer3 = pickle.loads(pickle.dumps(optimizer))
        assert type(optimizer3) is Tensors and isinstance(optimizer, Tensors)
        yield "pickled", optimizer3.state_dict()
        for i in range(3, 6):
            train(model, optimizer, i)
            train(model2, optimizer2, i)
        wrap.pending()
        if wrap.fused:
            wrap.optimizers.remove(optimizer)
            optimizer = optfuse.unfuse(optimizer)
            assert type(optimizer) is Tensors
        train(model, optimizer, 6)
        train(model2, optimizer2, 7)
        yield from everything(model, optimizer)
        yield from everything(model2, optimizer2)

    same(script, mode, prove=False)


@pytest.mark.parametrize("mode", MODES)
def test_groups_are_added(mode):
    def script(wrap):
        model = net()
        optimizer = wrap(Tensors(model[0].parameters()))
        for i in range(3):
            train(model, optimizer, i)
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
        for i in range(3, 6):
            train(model, optimizer, i)
        yield from everything(model, optimizer)

    same(script, mode)


def test_hooks_of_step_run_once_a_step():
    calls = []

    def hook(optimizer, args, kwargs):
        calls.append(type(optimizer))

    anywhere = register_optimizer_step_post_hook(hook)
    try:
        model = net()
        optimizer = optfuse.fuse(Tensors(model.parameters()))
        optimizer.register_step_pre_hook(hook)
        for i in range(3):
            train(model, optimizer, i)
        optfuse.flush(optimizer)
    finally:
        anywhere.remove()
    assert calls == [type(optimizer)] * 6


def test_closures():
    def iteration(model, optimizer, i):
        def closure(i=i):
            optimizer.zero_grad()
            loss = loss_of(model, i)
            loss.backward()
            return loss

        yield "loss", optimizer.step(closure)

    same(trained(Tensors, iteration=iteration))
