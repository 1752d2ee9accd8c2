# SPDX-License-Identifier: BSD-3-Clause
"""The updates of a pipeline's layers, one layer after the other, by an optimizer of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from optfuse._library.bindings import BACKWARD
from optfuse._link import link_of
from optfuse._options import is_fused

Given = Sequence[tuple[Tensor, Tensor]]  # parameters with their gradients


class Updates(Protocol):
    def update(self, given: Given) -> None:
        """Updates the parameters of one layer."""


def updates_of(optimizer: Optimizer, layers: int) -> Updates:
    """layers: how many are updated in a group."""
    if is_fused(optimizer) and link_of(optimizer).mode == BACKWARD:
        return InBackward(optimizer, layers)
    return ByStep(optimizer)


class ByStep:
    """A step() for each layer. In forward fusion the layer's next forward pass runs the update."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def update(self, given: Given) -> None:
        for parameter, gradient in given:
            parameter.grad = gradient
        self._optimizer.step()
        for parameter, _ in given:
            parameter.grad = None


class InBackward:
    """A backward pass for each layer, which begins with its complete gradients, so that backward
    fusion updates at once. One step() follows the last layer of a group."""

    def __init__(self, optimizer: Optimizer, layers: int) -> None:
        self._optimizer, self._layers = optimizer, layers
        self._updated: list[Tensor] = []
        self._left = layers

    def update(self, given: Given) -> None:
        if given:
            parameters, gradients = zip(*given, strict=True)
            torch.autograd.backward(parameters, gradients)
            self._updated += parameters
        self._left -= 1
        if self._left:
            return
        self._optimizer.step()
        for parameter in self._updated:
            parameter.grad = None
        self._updated, self._left = [], self._layers
