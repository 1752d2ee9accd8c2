# SPDX-License-Identifier: BSD-3-Clause
"""How a scenario is written: registered for the guard that it needs, and about a
stock and a fused optimizer that must agree."""

import ctypes

import torch
from common import adamw, assert_same, net, snapshot, train

import optfuse

SCENARIOS = {}


def guards(name, *others):
    """Registers a scenario; the others are off in both runs, because each of
    them would catch the fault too."""

    def register(scenario):
        SCENARIOS[name] = (scenario, others)
        return scenario

    return register


class Pair:
    """The same model with a stock and with a fused optimizer."""

    def __init__(self, mode="forward", build=net, make=adamw):
        torch.manual_seed(0)
        self.theirs, self.ours = build(), build()
        self.ours.load_state_dict(self.theirs.state_dict())
        self.stock = make(self.theirs.parameters())
        self.fused = optfuse.fuse(make(self.ours.parameters()), mode=mode)

    def train(self, i):
        train(self.theirs, self.stock, i)
        train(self.ours, self.fused, i)

    def assert_same(self):
        ours, theirs = dict(self.ours.state_dict()), dict(self.theirs.state_dict())
        assert_same("weights", snapshot(ours), theirs)

    def assert_pending(self):
        if optfuse.summary(self.fused).pending == 0:
            raise RuntimeError("no update is pending: the scenario would prove nothing")


def must_raise(call, what):
    try:
        call()
    except RuntimeError:
        return
    raise AssertionError(f"{what} raised no error")


def through_address(tensor):
    size = tensor.numel() * tensor.element_size()
    return ctypes.string_at(tensor.data_ptr(), size)
