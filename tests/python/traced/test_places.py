# SPDX-License-Identifier: BSD-3-Clause
"""A step() that keeps a place for each parameter in a list, tuple or dict finds another parameter's
in an update: fuse() refuses by looks, or the update that fills it does. docs/traced.md"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import optfuse


class ByPosition(Optimizer):
    """Keeps what belongs to parameters where their numbers are, from a step on that no trial
    meets."""

    kept: Any

    def __init__(self, params: Any, place: str, kind: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        n = sum(len(group["params"]) for group in self.param_groups)
        places = [None] * (n - 1) + [torch.ones(4)]
        kept = kind(places) if kind is not dict else dict(enumerate(places))
        if place == "attribute":
            self.kept = kept
        elif place == "option":
            self.param_groups[0]["kept"] = kept
        else:
            for p in self.param_groups[0]["params"]:
                self.state[p]["kept"] = kept
        self.n = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


@pytest.mark.parametrize("is_registered", [False, True])
@pytest.mark.parametrize("kind", [list, tuple, dict, deque])
@pytest.mark.parametrize("place", ["attribute", "option", "state entry"])
def test_what_is_read_by_position_is_refused(place: str, kind: Any, is_registered: bool) -> None:
    cls = type("Positions", (ByPosition,), {})
    if is_registered:
        optfuse.register(cls)
    params = [nn.Parameter(torch.randn(4)) for _ in range(3)]
    with pytest.raises(optfuse.Error, match=f"the {place} 'kept' has as many places as there are"):
        optfuse.fuse(cls(params, place, kind))


@pytest.mark.parametrize("kept", ([1.0, 2.0, 3.0], [None] * 3, {"a": None, "b": None, "c": None}))
def test_other_lists_are_taken(kept: Any) -> None:
    params = [nn.Parameter(torch.randn(4)) for _ in range(3)]
    optimizer = ByPosition(params, "attribute", list)
    optimizer.kept = kept
    optfuse.fuse(optimizer)


class FilledByPosition(ByPosition):
    """Fills at its first step what it reads by position afterwards."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    if self.kept[i] is None:
                        self.kept[i] = torch.zeros_like(p)
                    self.kept[i].add_(p.grad)
                    p.add_(self.kept[i], alpha=-group["lr"])


@pytest.mark.parametrize("is_registered", [False, True])
def test_a_list_that_is_filled_by_position_is_refused(is_registered: bool) -> None:
    cls = type("Filled", (FilledByPosition,), {})
    if is_registered:
        optfuse.register(cls)
    optimizer = cls([nn.Parameter(torch.randn(4)) for _ in range(3)], "attribute", list)
    optimizer.kept = [None] * 3
    with pytest.raises(optfuse.Error, match="does not treat parameters independently"):
        optfuse.fuse(optimizer)


class FilledLate(FilledByPosition):
    """Begins with it after all trials."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["n"] = self.state[p].get("n", 0) + 1
            if any(self.state[p]["n"] > 120 for p in group["params"] if p.grad is not None):
                super().step()


@pytest.mark.parametrize("place", ["attribute", "option"])
def test_a_list_that_is_filled_after_the_trial_is_refused_then(place: str) -> None:
    class Filled(FilledLate):
        def __getattribute__(self, name: str) -> Any:
            is_option = name == "kept" and "kept" in self.param_groups[0]
            return self.param_groups[0]["kept"] if is_option else super().__getattribute__(name)

    optfuse.register(Filled)
    params = [nn.Parameter(torch.randn(4)) for _ in range(3)]
    optimizer = Filled(params, "attribute", list)
    optimizer.kept = [None] * 3
    if place == "option":
        del optimizer.kept
        optimizer.param_groups[0]["kept"] = [None] * 3
    optfuse.fuse(optimizer)
    for _ in range(120):
        for p in params:
            p.grad = torch.ones(4)
        optimizer.step()
    with pytest.raises(optfuse.Error, match="it changed 'kept' of the optimizer"):
        optimizer.step()
        optfuse.flush(optimizer)
