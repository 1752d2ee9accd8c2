# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers whose gradients K-FAC preconditions, and GradScaler: gradients of outputs are seen
scaled, and a skipped step commits nothing."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch.optim import Optimizer


class Scaled(Protocol):
    """Preconditions gradients of which it has seen those of a scaled loss."""

    scale: float  # of the loss, since the last step()

    def discard(self) -> None: ...


_known: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Scaled]] = weakref.WeakKeyDictionary()


def know(optimizer: Optimizer, kfac: Scaled) -> None:
    _known[optimizer] = weakref.ref(kfac)


def forget(optimizer: Optimizer) -> None:
    _known.pop(optimizer, None)


def kfac_of(optimizer: Any) -> Scaled | None:
    """The K-FAC that preconditions its gradients."""
    found = _known.get(optimizer) if isinstance(optimizer, Optimizer) else None
    return found() if found else None
