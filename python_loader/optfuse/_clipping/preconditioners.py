# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers whose gradients K-FAC preconditions, and GradScaler: gradients of outputs are seen
scaled, and a skipped step commits nothing."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from optfuse._patches.listed import replace


class Scaled(Protocol):
    """Preconditions gradients of which it has seen those of a scaled loss."""

    scale: float  # of the loss, since the last step()
    steps: int

    def discard(self) -> None: ...


_known: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Scaled]] = weakref.WeakKeyDictionary()


def know(optimizer: Optimizer, kfac: Scaled) -> None:
    _known[optimizer] = weakref.ref(kfac)


def forget(optimizer: Optimizer) -> None:
    _known.pop(optimizer, None)


def kfac_of(optimizer: Any) -> Scaled | None:
    """That preconditions its gradients."""
    found = _known.get(optimizer) if isinstance(optimizer, Optimizer) else None
    return found() if found else None


def note_scale(scaler: torch.amp.GradScaler, optimizer: Any) -> None:
    """Its gradients are about to be divided by the scale."""
    kfac = kfac_of(optimizer)
    if kfac is not None:
        kfac.scale = scaler.get_scale()


def install() -> None:
    """Once per process."""
    stock = torch.amp.GradScaler.step

    @functools.wraps(stock)
    def step(self: torch.amp.GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        kfac = kfac_of(optimizer)
        before = kfac.steps if kfac else 0
        returned = stock(self, optimizer, *args, **kwargs)
        if kfac is not None and kfac.steps == before:
            kfac.discard()
        return returned

    replace(torch.amp.GradScaler, "step", step)
