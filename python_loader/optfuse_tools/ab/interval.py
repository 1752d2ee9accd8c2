# SPDX-License-Identifier: BSD-3-Clause
"""A median with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

RESAMPLES = 4000  # of the bootstrap
LOSS, GAIN = 0.9, 1.1  # a speed that may be both is not known


@dataclass(frozen=True)
class Interval:
    """A median and the bounds of its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def median_interval(samples: Sequence[float], seed: int = 0) -> Interval:
    """The median of the samples and its 95 % bootstrap interval."""
    values = torch.tensor(samples, dtype=torch.float64, device="cpu")
    generator = torch.Generator("cpu").manual_seed(seed)
    shape = (RESAMPLES, len(values))
    picks = torch.randint(len(values), shape, generator=generator, device="cpu")
    medians = values[picks].quantile(0.5, dim=1)
    bounds = medians.quantile(values.new_tensor([0.025, 0.975]))
    return Interval(values.quantile(0.5).item(), bounds[0].item(), bounds[1].item())
