# SPDX-License-Identifier: BSD-3-Clause
"""Whoever watches step() and zero_grad() sees of a fused optimizer what he sees of stock;
nobody else pays for it."""

import json
import weakref
from collections import Counter

import pytest
import torch
from common import adamw, everything, fused_backward, net, refused, same, train
from torch import nn
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

import optfuse

both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))
RANGES = ("Optimizer.step#AdamW.step", "Optimizer.zero_grad#AdamW.zero_grad")


@both_modes
def test_a_profiler_that_comes_and_goes_sees_the_ranges_of_stock(mode):
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(6):
            if i % 2 == 0:
                train(model, optimizer, i)
                continue
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                train(model, optimizer, i)
            seen = Counter(event.name for event in profiler.events())
            yield "ranges", {name: seen[name] for name in RANGES}
            assert all(seen[name] == 1 for name in RANGES)
        yield from everything(model, optimizer)

    same(script, mode)


LOOKS = {
    "shapes": {"record_shapes": True},
    "stacks": {"with_stack": True},
    "all": {"record_shapes": True, "with_stack": True, "profile_memory": True},
}


def seen_by(profiler):
    """Operators of the forward pass and the shapes of what they got."""
    linear = [e.input_shapes for e in profiler.events() if e.name == "aten::linear"]
    return {
        "shapes": linear,
        "optimizer": any("_optimizer_step_code" in e.name for e in profiler.events()),
    }


@both_modes
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("set_to_none", (True, False))
def test_a_profiler_that_looks_at_tensors_sees_those_of_stock(look, mode, set_to_none):
    """It asks for their addresses past the dispatcher, from an update that is pending when it
    begins until the first step() after it has ended."""

    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        train(model, optimizer, 0, set_to_none)
        wrap.pending()
        for i in range(2):
            with profile(activities=[ProfilerActivity.CPU], **LOOKS[look]) as profiler:
                for k in range(3):
                    train(model, optimizer, 3 * i + k, set_to_none)
            seen = seen_by(profiler)
            assert len(seen["shapes"]) == 3 * 3
            assert seen["optimizer"] == ("with_stack" in LOOKS[look])
            yield "seen", seen
            train(model, optimizer, 9, set_to_none)
            wrap.pending()
        yield from everything(model, optimizer)

    same(script, mode)


@both_modes
def test_an_execution_trace_sees_the_tensors_of_stock(mode, tmp_path):
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        train(model, optimizer, 0)
        observer = ExecutionTraceObserver().register_callback(str(tmp_path / "trace.json"))
        observer.start()
        for i in range(2):
            train(model, optimizer, i)
        observer.stop()
        observer.unregister_callback()
        nodes = json.loads((tmp_path / "trace.json").read_text())["nodes"]
        shapes = [node["inputs"]["shapes"] for node in nodes if node["name"] == "aten::linear"]
        assert len(shapes) == 2 * 3
        yield "shapes", shapes
        train(model, optimizer, 3)
        wrap.pending()
        yield from everything(model, optimizer)

    same(script, mode)


@both_modes
def test_without_a_profiler_no_range_is_made(mode, monkeypatch):
    entered = []
    enter = record_function.__enter__
    monkeypatch.setattr(record_function, "__enter__", lambda r: entered.append(r.name) or enter(r))
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()), mode=mode)
    for i in range(3):
        train(model, optimizer, i)
    assert entered == []
    optimizer.register_step_pre_hook(lambda *_: None)
    train(model, optimizer, 3)
    assert entered == [RANGES[0]]


def test_step_takes_a_closure_either_way():
    optimizer = optfuse.fuse(adamw(net().parameters()))
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        return torch.tensor(3.0)

    assert optimizer.step(closure) == 3 and optimizer.step(closure=closure) == 3
    assert calls == [True, True]


# zero_grad()


class Counting(torch.optim.AdamW):
    zeroed = 0

    def zero_grad(self, set_to_none=True):
        self.zeroed += 1
        super().zero_grad(set_to_none)


@both_modes
def test_a_zero_grad_of_the_class_itself_is_called(mode):
    optfuse.register(Counting, per_parameter=True)
    model = net()
    optimizer = optfuse.fuse(Counting(model.parameters()), mode=mode)
    for i in range(3):
        train(model, optimizer, i)
    assert optimizer.zeroed == 3


@both_modes
def test_a_replaced_zero_grad_of_all_optimizers_is_called(mode, monkeypatch):
    called = []
    stock = Optimizer.zero_grad
    monkeypatch.setattr(
        Optimizer, "zero_grad", lambda self, *args: (called.append(args), stock(self, *args))
    )
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()), mode=mode)
    train(model, optimizer, 0)
    assert len(called) == 1


@both_modes
def test_all_gradients_are_none_afterwards_and_die(mode):
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()), mode=mode)
    for i in range(3):
        train(model, optimizer, i)
    optfuse.flush(optimizer)
    gradients = [weakref.ref(p.grad) for p in model.parameters()]
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    if mode == "forward":  # backward mode keeps those that are spent, for the next time
        assert all(gradient() is None for gradient in gradients)


@both_modes
def test_gradients_someone_has_stay_his(mode):
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        for i in range(3):
            train(model, optimizer, i)
            if not wrap.fused or mode == "forward":
                kept = model[0].weight.grad
                optimizer.zero_grad()
                assert model[0].weight.grad is None
                kept.mul_(2)
            optimizer.zero_grad()
        yield from everything(model, optimizer)

    same(script, mode)


@both_modes
def test_a_parameter_added_by_hand_is_zeroed_too(mode):
    def script(wrap):
        model, late = net(), nn.Linear(3, 2)
        optimizer = wrap(adamw(model.parameters()))
        for i in range(5):
            optimizer.zero_grad()
            loss = (late(model(torch.ones(2, 6))) - i).square().mean()
            loss.backward()
            if i == 2:
                late.zero_grad()
            optimizer.step()
            if i == 2:
                optimizer.param_groups[0]["params"] += late.parameters()
                late.weight.grad = torch.ones_like(late.weight)
                optimizer.zero_grad()
                yield "gradients", [p.grad is None for p in (*model.parameters(), late.weight)]
        yield from everything(nn.Sequential(model, late), optimizer)

    same(script, mode)


def test_a_finalizer_of_a_gradient_may_change_the_optimizer():
    """Nothing is lost when what dies in zero_grad() adds parameters to the optimizer."""
    model, late = net(), nn.Linear(3, 3)
    optimizer = optfuse.fuse(adamw(model.parameters()))
    train(model, optimizer, 0)
    optfuse.flush(optimizer)

    class Adds:
        def __del__(self):
            optimizer.add_param_group({"params": list(late.parameters())})

    model[2].weight.grad.adds = Adds()
    late.weight.grad = torch.ones_like(late.weight)
    optimizer.zero_grad()
    assert len(optimizer.param_groups) == 2
    assert all(p.grad is None for p in model.parameters())
    late(model(torch.ones(1, 6))).square().sum().backward()
    before = late.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, late.weight)


def test_backward_mode_still_refuses_to_throw_applied_gradients_away():
    model, optimizer = fused_backward()
    train(model, optimizer, 0)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(torch.ones(2, 6)), torch.ones(2, 3)).backward()
    refused(optimizer.zero_grad, "step()")
