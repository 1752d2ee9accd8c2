# SPDX-License-Identifier: BSD-3-Clause
"""Profilers and hooks see of a fused optimizer what they see of stock; nobody else pays for
it."""

import copy
import functools
import json
import pickle
import re
from collections import Counter

import pytest
import torch
from common import adamw, everything, fused_backward, loss_of, net, same, train
from scripts import trained
from torch import nn
from torch.autograd.profiler import record_function
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


@both_modes
def test_a_profile_shows_updates_where_they_run(mode):
    model = nn.Sequential(nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 60))
    named = optfuse.fuse(torch.optim.AdamW(model.named_parameters()), mode=mode)
    model_2 = nn.Linear(60, 60)
    own = optfuse.fuse(torch.optim.SGD(model_2.parameters()), mode=mode)
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            with record_function("forward"):
                loss = model(torch.ones(2, 60)).sum() + model_2(torch.ones(2, 60)).sum()
            with record_function("backward"):
                loss.backward()
            named.step()
            own.step()
            named.zero_grad()
            own.zero_grad()
    events = profiler.events()
    place = next(event.time_range for event in events if event.name == mode)
    updates = [event for event in events if event.name.startswith("optfuse::")]
    assert all(place.start <= u.time_range.start < u.time_range.end <= place.end for u in updates)
    names = "".join(sorted(update.name for update in updates))
    assert re.search(r"optfuse::adam parameter '[02].(weight|bias)' of shape \(60,", names)
    assert re.search(r"optfuse::sgd parameter [01] of group 0 of shape \(60,", names)
    shown = len(updates) + sum(int(u.name.split()[-2]) for u in updates if u.name.endswith("more"))
    assert shown == 6


LOOKS = {
    "shapes": {"record_shapes": True},
    "stacks": {"with_stack": True},
    "all": {"record_shapes": True, "with_stack": True, "profile_memory": True},
}


def shapes_of(profiler, operator="aten::linear"):
    """Shapes of the operator's inputs, each time it was called."""
    return [event.input_shapes for event in profiler.events() if event.name == operator]


@functools.cache
def shows_python():
    """Whether a profile has Python functions; with 2.11 under Python 3.12 none has."""
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
        loss_of(net(), 0)
    return any("loss_of" in event.name for event in profiler.events())


@both_modes
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("set_to_none", (True, False))
def test_a_profiler_that_looks_at_tensors_sees_those_of_stock(look, mode, set_to_none):
    """It asks for their addresses past the dispatcher, from an update that is pending when it
    begins until the first step() after it has ended."""

    def start(wrap):
        model = net()
        optimizer = wrap(adamw(model.parameters()))
        train(model, optimizer, 0, set_to_none)
        wrap.pending()
        return model, optimizer

    def iteration(model, optimizer, i):
        with profile(activities=[ProfilerActivity.CPU], **LOOKS[look]) as profiler:
            for k in range(3):
                train(model, optimizer, 3 * i + k, set_to_none)
        shapes = shapes_of(profiler)
        assert len(shapes) == 3 * 3
        yield "shapes", shapes
        optimizers = any("_optimizer_step_code" in e.name for e in profiler.events())
        assert optimizers == ("with_stack" in LOOKS[look] and shows_python())
        train(model, optimizer, 9, set_to_none)

    same(trained(start=start, iteration=iteration, pending=True), mode)


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
        shapes = shapes_of(profiler)
        assert len(shapes) == 3 * 3
        yield "shapes", shapes
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
        yield "shapes", shapes_of(profiler, "aten::exp")
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
        shapes = shapes_of(profiler)
        assert len(shapes) == 2 * 3
        yield "shapes", shapes
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


# Consumed gradients


@pytest.mark.parametrize("watched", (False, True))
def test_a_consumed_gradient_is_not_saved_as_nothing(watched, tmp_path):
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
