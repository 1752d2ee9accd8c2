# SPDX-License-Identifier: BSD-3-Clause
"""The versions of a layer's parameters, on a process that owns them.

Version v is after the updates of the groups before v. Group g's forward sees version g - D, and
the backward passes of part p see g - E(p): both no less than the version at the last drain().

A version is a copy on write: it shares its memory with the parameter until an update writes that
while someone still holds the version. So nothing is copied that nobody needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from optfuse_layers.delay import average

MODES = ("stash", "latest", "average")

Version = dict[str, Tensor]  # of parameters, by their names in the layer


def products(layer: nn.Module) -> set[str]:
    """Names of the weights of Linear and Conv2d in an entry: those whose products with dY may see
    another version than the forward."""
    return {
        f"{prefix}{'.' if prefix else ''}weight"
        for prefix, module in layer.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }


class Weights:
    """The versions of one layer's weights. groups: counted from the first that was ever run."""

    def __init__(self, layer: nn.Module, delay: int, behind: Iterable[int], mode: str) -> None:
        """behind: E of each part of dX."""
        self.parameters = {n: p for n, p in layer.named_parameters() if p.requires_grad}
        self.delay = delay
        self.mode = mode
        self.products = products(layer) & set(self.parameters)
        self.replaced = self.products if mode != "stash" else set()
        # Their versions share memory with the parameters: without delays nobody needs an earlier
        # one, and a fused optimizer defers updates only of memory that nobody shares.
        self._aliased = self.replaced if delay else set(self.parameters)
        self.updates = self.drained = 0
        self.forwards = 0  # groups whose forward passes have all seen their version
        self._now: Version | None = None
        self._held: dict[int, Version] = {}  # that forwards to come will see
        self._parts = [_Part(late) for late in behind]
        self._averages = (
            {n: torch.zeros_like(self.parameters[n]) for n in self.replaced}
            if mode == "average" and delay
            else {}
        )

    def stash_bytes(self) -> int:
        """Bytes of the versions while the pipeline is full."""
        stashed = (p.nbytes for n, p in self.parameters.items() if n not in self.replaced)
        return self.delay * sum(stashed) + sum(t.nbytes for t in self._averages.values())

    def forward(self, group: int) -> Version:
        """Leaves that require gradients. Those of a version are the same for all who ask."""
        return self._version(self._seen(group, self.delay))

    def done_forward(self, group: int) -> None:
        """No forward of this group comes any more."""
        self.forwards = group + 1
        needed = self._seen(self.forwards, self.delay)
        self._held = {v: held for v, held in self._held.items() if v >= needed}

    def backward(self, group: int, part: int = 0) -> Version:
        """The weights of Linear and Conv2d for the dX of a group; detached."""
        held = self._parts[part].held.get(group)
        return self._replacement(group, part) if held is None else held

    def done_backward(self, group: int, part: int = 0) -> None:
        self._parts[part].done = group + 1
        self._parts[part].held.pop(group, None)

    def skip(self, group: int) -> None:
        """A group of which no batch comes here."""
        self.done_forward(group)
        for part in range(len(self._parts)):
            self.done_backward(group, part)

    def before_update(self) -> Version:
        """To be called before the parameters are written, and its result given to
        after_update()."""
        before = {n: torch._lazy_clone(self.parameters[n].detach()) for n in self._averages}
        if self._seen(self.forwards, self.delay) <= self.updates:
            self._held[self.updates] = self._copied()
        for number, part in enumerate(self._parts):
            if self.replaced:
                for group in range(part.done, self.updates + part.behind + 1):
                    if self._seen(group, part.behind) == self.updates:
                        part.held[group] = self._replacement(group, number)
        self._now = None
        return before

    def after_update(self, before: Version) -> None:
        self.updates += 1
        for name, old in before.items():
            after = self.parameters[name].detach()
            average.follow(self._averages[name], old, after, self.updates, self.delay)

    def drain(self) -> None:
        """All forwards to come see all updates."""
        self.drained = self.updates
        self._held.clear()
        for part in self._parts:
            part.held.clear()

    # State

    def state(self) -> dict[str, Any]:
        copied = {v: _plain(held) for v, held in self._held.items()}
        return {
            "updates": self.updates,
            "drained": self.drained,
            "held": copied,
            "parts": [{g: _plain(held) for g, held in p.held.items()} for p in self._parts],
            "averages": _plain(self._averages),
        }

    def load(self, state: dict[str, Any]) -> None:
        """After the parameters themselves. state: of the same layer in the same plan."""
        self._now = None
        self.updates, self.drained = state["updates"], state["drained"]
        self.forwards = self.updates
        self._held = {v: _leaves(_like(self.parameters, h)) for v, h in state["held"].items()}
        for part, held in zip(self._parts, state["parts"], strict=True):
            part.done = self.updates
            part.held = {g: _like(self.parameters, version) for g, version in held.items()}
        self._averages = _like(self.parameters, state["averages"])

    # Inside

    def _seen(self, group: int, late: int) -> int:
        return max(self.drained, group - late)

    def _version(self, version: int) -> Version:
        if version != self.updates:
            return self._held[version]
        if self._now is None:
            self._now = _leaves(
                {
                    n: p.detach() if n in self._aliased else torch._lazy_clone(p.detach())
                    for n, p in self.parameters.items()
                }
            )
        return self._now

    def _copied(self) -> Version:
        """The newest version, which the next update leaves alone."""
        now = self._version(self.updates)
        return _leaves(
            {n: torch._lazy_clone(t.detach()) if n in self._aliased else t for n, t in now.items()}
        )

    def _replacement(self, group: int, part: int) -> Version:
        seen = self._seen(group, self._parts[part].behind)
        changes = seen - self._seen(group, self.delay)
        if self.mode == "average" and changes:
            return {
                n: average.reconstruct(self.parameters[n].detach(), self._averages[n], changes)
                for n in self.replaced
            }
        version = self._version(seen)
        return {n: torch._lazy_clone(version[n].detach()) for n in self.products}


class _Part:
    """Progress of one part of dX. done: groups whose dX has got its weights; held: later groups
    whose version has gone."""

    def __init__(self, behind: int) -> None:
        self.behind = behind
        self.done = 0
        self.held: dict[int, Version] = {}


def _leaves(version: Version) -> Version:
    return {n: t if t.requires_grad else t.requires_grad_() for n, t in version.items()}


def _plain(version: Version) -> Version:
    return {n: t.detach().clone() for n, t in version.items()}


def _like(parameters: dict[str, nn.Parameter], version: Version) -> Version:
    """With the devices and strides of the parameters."""
    return {n: torch.empty_like(parameters[n]).detach().copy_(t) for n, t in version.items()}
