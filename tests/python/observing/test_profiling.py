# SPDX-License-Identifier: BSD-3-Clause
"""Profilers and hooks see of a fused optimizer what they see of stock; nobody else pays for
it."""

import copy
import pickle
import re

import pytest
import torch
from common import adamw, fused_backward, net, train
from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

import optfuse

both_modes = pytest.mark.parametrize("mode", ("forward", "backward"))
RANGES = ("Optimizer.step#AdamW.step", "Optimizer.zero_grad#AdamW.zero_grad")


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
