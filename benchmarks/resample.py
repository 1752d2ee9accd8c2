# SPDX-License-Identifier: BSD-3-Clause
"""Bootstrap intervals of what is computed from several medians."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from optfuse._ab.result import RESAMPLES, Interval


def of_medians(formula: Callable[..., Tensor], *series: Sequence[float]) -> Interval:
    """The formula of the medians of these series. They hold the same rounds,
    and rounds are drawn again, so that what disturbed one disturbs all."""
    times = torch.tensor(series, dtype=torch.float64)
    rounds = times.shape[1]
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(rounds, (RESAMPLES, rounds), generator=generator)
    drawn = formula(*times[:, picks].quantile(0.5, dim=2))
    low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return Interval(formula(*times.quantile(0.5, dim=1)).item(), low.item(), high.item())


def share(
    fused: Sequence[float], own: Sequence[float], without: Sequence[float]
) -> Interval | None:
    """(fused - ours) / (fused - no optimizer); None if it can't be told whether
    stock's optimizer costs anything."""
    if of_medians(lambda f, w: f - w, fused, without).low <= 0:
        return None
    return of_medians(lambda f, o, w: (f - o) / (f - w), fused, own, without)
