# SPDX-License-Identifier: BSD-3-Clause
"""The forward's weights from the newest ones and a moving average of their changes: the idea of
LayerPipe2 (arXiv 2512.08160), where a moving average takes the place of stored weights.

Of a weight with delay D, W_v being the weight after v updates, and M_0 = 0:

    M_v = beta M_(v-1) + (1 - beta) (W_v - W_(v-1)),    beta = (w - 1) / (w + 1), w = min(v, D)
    W' = W_v - n M_v

W' stands for W_(v-n) in the dX of a batch whose forward saw W_(v-n). beta / (1 - beta), the mean
age of what is in the average, is (w - 1) / 2, as in a window of the last w changes. With D = 1 the
average is the last change, and W' is W_(v-1) but for rounding. Products and sums are those of the
code below, in the weight's dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def decay(updates: int, delay: int) -> float:
    """beta for the updates-th change, the first being 1. delay: D, at least 1."""
    window = min(updates, delay)
    return (window - 1) / (window + 1)


@torch.no_grad()
def follow(average: Tensor, before: Tensor, after: Tensor, updates: int, delay: int) -> None:
    """Makes M_v of M_(v-1) in place, v being `updates`. before: W_(v-1); after: W_v."""
    beta = decay(updates, delay)
    average.mul_(beta).add_(after - before, alpha=1 - beta)


@torch.no_grad()
def reconstruct(now: Tensor, average: Tensor, changes: int) -> Tensor:
    """W', a new tensor. changes: n, at least 1."""
    return torch.sub(now, average, alpha=changes)
