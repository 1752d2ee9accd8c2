# SPDX-License-Identifier: BSD-3-Clause
"""A launch is a range of torch.profiler, where it happens and named by what it updates."""

import pytest
import torch
from common import adamw
from fakecuda import NAME
from torch.profiler import ProfilerActivity, profile

import optfuse


def ranges(mode):
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Linear(6, 3)).to(NAME)
    optimizer = optfuse.fuse(adamw(model.parameters()), mode=mode)
    x = torch.ones(4, 5, device=NAME)

    def iterate():
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    iterate()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        iterate()
    return [event for event in profiler.events() if event.name.startswith("optfuse::")]


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_an_update_is_one_range_named_by_rule_and_bucket(mode):
    assert [event.name for event in ranges(mode)] == ["optfuse::adam 4 parameters, 57 float32"]


def test_forward_fusion_updates_inside_the_operator_that_uses_the_weight():
    assert ranges("forward")[0].cpu_parent.name == "aten::linear"
