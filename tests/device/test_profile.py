# SPDX-License-Identifier: BSD-3-Clause
"""A launch is a range of torch.profiler, where it happens and named by what it updates."""

import gpu
import pytest
import torch
from common import adamw
from gpu import NAME
from torch.profiler import ProfilerActivity, profile, record_function

import optfuse

ITERATIONS = 3
MODES = ("forward", "backward")


def profiled(mode):
    """The profiler's events of some iterations."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Linear(6, 3)).to(NAME)
    optimizer = optfuse.fuse(adamw(model.parameters()), mode=mode)
    x = torch.ones(4, 5, device=NAME)

    def iterate():
        optimizer.zero_grad()
        with record_function("phase forward"):
            loss = model(x).sum()
        with record_function("phase backward"):
            loss.backward()
        with record_function("phase step"):
            optimizer.step()

    iterate()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu.IS_REAL else [])]
    with profile(activities=activities) as profiler:
        for _ in range(ITERATIONS):
            iterate()
        gpu.synchronize()
    return profiler.events()


def ranges(events, begin="optfuse::"):
    return [event for event in events if event.name.startswith(begin)]


@pytest.mark.parametrize("mode", MODES)
def test_an_update_is_one_range_named_by_rule_and_bucket(mode):
    names = [event.name for event in ranges(profiled(mode))]
    assert names == ITERATIONS * ["optfuse::adam 4 parameters, 57 float32"]


@pytest.mark.parametrize(("mode", "phase"), [("forward", "step"), ("backward", "backward")])
def test_updates_are_launched_in_their_phase(mode, phase):
    events = profiled(mode)
    phases = [event.time_range for event in ranges(events, f"phase {phase}")]
    updates = ranges(events)
    for update, phase in zip(updates, phases, strict=True):
        assert phase.start <= update.time_range.start and update.time_range.end <= phase.end
    if gpu.IS_REAL:
        assert ranges(events, "of_"), "no kernel of ours was seen"
