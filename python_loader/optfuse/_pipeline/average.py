# SPDX-License-Identifier: BSD-3-Clause
"""Weights of a forward pass, rebuilt from the newest ones and a moving average of how they change,
where keeping the old ones would take too much memory. After LayerPipe2 (arXiv 2512.08160), which
averages gradients of SGD; the change of a weight is what any optimizer makes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Average:
    """Of one weight, O(1) times its size. After update t, which made the weight W(t) of W(t-1),

        A(t) = A(t-1) + (W(t) - W(t-1) - A(t-1)) / min(t, D),

    the mean of the changes of the first D updates and from there on a moving average of about as
    many, and the weight of n updates ago is taken to be W(t) - n A(t)."""

    def __init__(self, weight: Tensor, delay: int) -> None:
        """weight: gives shape, dtype and device. delay: D, at least 1."""
        self._delay = delay
        self._updates = 0
        self._change = torch.zeros_like(weight)

    def add(self, before: Tensor, after: Tensor) -> None:
        """The next update made one of the other."""
        self._updates += 1
        self._change.lerp_(after - before, 1.0 / min(self._updates, self._delay))

    def before(self, newest: Tensor, updates: int) -> Tensor:
        """About what the weight was so many updates ago, at most D."""
        return torch.add(newest, self._change, alpha=-updates)

    def nbytes(self) -> int:
        return self._change.nbytes

    def state(self) -> dict[str, Any]:
        return {"updates": self._updates, "change": self._change}

    def load(self, state: dict[str, Any]) -> None:
        self._updates = state["updates"]
        self._change.copy_(state["change"])
