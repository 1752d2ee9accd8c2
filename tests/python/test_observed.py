# SPDX-License-Identifier: BSD-3-Clause
"""Profilers, hooks and others that watch step() and zero_grad() see of a fused optimizer what
they see of stock; nobody else pays for it."""

import copy
import json
import pickle
import weakref
from collections import Counter

import pytest
import torch
from common import (
    adamw,
    everything,
    fused_backward,
    loss_of,
    net,
    python_ok,
    refused,
    same,
    train,
)
from torch import nn
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
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
@pytest.mark.parametrize("compiled_before", (False, True))
def test_without_a_profiler_no_range_is_made(mode, compiled_before, monkeypatch):
    entered = []
    enter = record_function.__enter__
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()), mode=mode)
    if compiled_before:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    monkeypatch.setattr(record_function, "__enter__", lambda r: entered.append(r.name) or enter(r))
    for i in range(3):
        train(model, optimizer, i)
    assert entered == []
    optimizer.register_step_pre_hook(lambda *_: None)
    train(model, optimizer, 3)
    assert entered == [RANGES[0]]


@both_modes
def test_hooks_come_and_go(mode):
    def script(wrap):
        model, seen = net(), []
        optimizer = wrap(adamw(model.parameters()))
        for i in range(8):
            train(model, optimizer, i)
            if i == 1:
                before = optimizer.register_step_pre_hook(lambda *_, i=i: seen.append(i))
            if i == 3:
                before.remove()
                after = register_optimizer_step_post_hook(lambda *_, i=i: seen.append(i))
            if i == 5:
                after.remove()
        assert seen == [1, 1, 3, 3]
        yield from everything(model, optimizer)

    same(script, mode)


@both_modes
def test_a_hook_that_a_closure_adds_is_called_in_this_very_step(mode):
    def script(wrap):
        model, seen = net(), []
        optimizer = wrap(adamw(model.parameters()))

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            optimizer.register_step_post_hook(lambda *_: seen.append(len(seen)))
            return loss

        for _ in range(3):
            optimizer.step(closure)
            yield "calls", len(seen)

    same(script, mode)


@both_modes
@pytest.mark.parametrize("look", LOOKS)
def test_a_profiler_that_a_closure_starts(look, mode):
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        profiler = profile(activities=[ProfilerActivity.CPU], **LOOKS[look])
        calls = 0

        def closure():
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            if calls == 2:
                profiler.start()
            loss = loss_of(model, calls)
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)
        profiler.stop()
        linear = [e.input_shapes for e in profiler.events() if e.name == "aten::linear"]
        assert len(linear) == 3 * 3
        yield "shapes", linear
        yield from everything(model, optimizer)

    same(script, mode)


@pytest.mark.parametrize("look", LOOKS)
def test_gradients_that_are_clipped_under_a_profiler_that_looks(look):
    """Multiplying them is left to the update elsewhere."""

    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with profile(activities=[ProfilerActivity.CPU], **LOOKS[look]) as profiler:
            for i in range(2):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, i)).backward()
                scaler.unscale_(optimizer)
                yield "norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                yield "norms", [p.grad.exp().sum() for p in model.parameters()]
                model(torch.ones(2, 6))
                scaler.step(optimizer)
                scaler.update()
        yield "exp", [e.input_shapes for e in profiler.events() if e.name == "aten::exp"]
        yield from everything(model, optimizer)

    same(script, prove=False)


@both_modes
def test_a_profiler_that_is_switched_on_again(mode):
    def script(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        cpu = [ProfilerActivity.CPU]
        with profile(activities=cpu, record_shapes=True) as profiler:
            train(model, optimizer, 0)
            profiler.toggle_collection_dynamic(False, cpu)
            train(model, optimizer, 1)
            profiler.toggle_collection_dynamic(True, cpu)
            train(model, optimizer, 2)
        linear = [e.input_shapes for e in profiler.events() if e.name == "aten::linear"]
        assert len(linear) == 2 * 3
        yield "shapes", linear
        yield from everything(model, optimizer)

    same(script, mode)


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


def test_a_zero_grad_that_was_replaced_before_we_came_is_called():
    assert (
        python_ok(
            """
import torch
stock, called = torch.optim.Optimizer.zero_grad, []
torch.optim.Optimizer.zero_grad = lambda self, *args: (called.append(1), stock(self, *args))
import optfuse
p = torch.nn.Parameter(torch.ones(3))
optimizer = optfuse.fuse(torch.optim.AdamW([p], fused=True))
p.sum().backward()
optimizer.zero_grad()
print(called, p.grad)
""",
            fresh=True,
        ).strip()
        == "[1] None"
    )


@both_modes
def test_parameters_of_a_class_with_a_grad_of_its_own(mode):
    class Noting(nn.Parameter):
        dropped = 0

        @property
        def grad(self):
            return torch.Tensor.grad.__get__(self)

        @grad.setter
        def grad(self, value):
            Noting.dropped += value is None
            torch.Tensor.grad.__set__(self, value)

    p = Noting(torch.ones(3))
    optimizer = optfuse.fuse(adamw([p]), mode=mode)
    for _ in range(2):
        p.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert Noting.dropped == 2


def test_a_finalizer_of_a_gradient_may_unfuse_the_optimizer():
    model = net()
    optimizer = optfuse.fuse(adamw(model.parameters()))
    train(model, optimizer, 0)
    optfuse.flush(optimizer)

    class Unfuses:
        def __del__(self):
            optfuse.unfuse(optimizer)

    model[0].bias.grad.unfuses = Unfuses()
    optimizer.zero_grad()
    assert type(optimizer) is torch.optim.AdamW
    assert all(p.grad is None for p in model.parameters())
    train(model, optimizer, 1)


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


# Spent gradients


@pytest.mark.parametrize("watched", (False, True))
def test_a_spent_gradient_is_not_saved_as_nothing(watched, tmp_path):
    """Neither before a profiler that notes addresses nor after it."""
    model, optimizer = fused_backward()
    train(model, optimizer, 0)
    if watched:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True):
            train(model, optimizer, 1)
        train(model, optimizer, 2)
    for save in (lambda g: torch.save(g, tmp_path / "g.pt"), pickle.dumps, copy.deepcopy):
        with pytest.raises(RuntimeError):
            save(model[0].weight.grad)
