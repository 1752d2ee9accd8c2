# SPDX-License-Identifier: BSD-3-Clause
"""The updates of a pipeline's layers, one layer after the other, by an optimizer of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._library.bindings import BACKWARD
from optfuse._link import link_of
from optfuse._options import is_fused

Given = Sequence[tuple[Tensor, Tensor]]  # parameters with their gradients


class Updates(Protocol):
    waits: bool  # for the last layer of a group, and updates them all

    def update(self, given: Given) -> None:
        """Updates the parameters of one layer."""


def updates_of(
    optimizer: Optimizer,
    layers: int,
    is_synchronous: bool,
    shared: Callable[[], Iterable[tuple[Tensor, Tensor]]] | None,
) -> Updates:
    """layers: how many are updated in a group. shared: the parameters that layers share, with
    their gradients, at the end of a group; None: there are none."""
    in_backward = is_fused(optimizer) and link_of(optimizer).mode == BACKWARD
    if shared is not None or (is_fused(optimizer) and is_synchronous):
        return ByOneStep(optimizer, layers, in_backward, shared)
    return BySteps(optimizer)


class BySteps:
    """A step() for each layer."""

    waits = False

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def update(self, given: Given) -> None:
        for parameter, gradient in given:
            parameter.grad = gradient
        self._optimizer.step()
        for parameter, _ in given:
            parameter.grad = None


class ByOneStep:
    """One step() for all layers of a group. Backward fusion updates each layer before, in a
    backward pass that begins with its complete gradients; forward fusion leaves the updates to the
    next forward passes."""

    def __init__(
        self,
        optimizer: Optimizer,
        layers: int,
        in_backward: bool,
        shared: Callable[[], Iterable[tuple[Tensor, Tensor]]] | None,
    ) -> None:
        self._optimizer, self._layers, self._shared = optimizer, layers, shared
        self._in_backward, self.waits = in_backward, not in_backward or shared is not None
        self._updated: list[Tensor] = []
        self._left = layers

    def update(self, given: Given) -> None:
        self._hand_over(given)
        self._left -= 1
        if self._left:
            return
        if self._shared is not None:
            self._hand_over(list(self._shared()))
        self._optimizer.step()
        for parameter in self._updated:
            parameter.grad = None
        self._updated, self._left = [], self._layers

    def _hand_over(self, given: Given) -> None:
        if self._in_backward and given:
            torch.autograd.backward(*zip(*given, strict=True))
        elif given:
            for parameter, gradient in given:
                parameter.grad = gradient
        self._updated += (parameter for parameter, _ in given)
