# SPDX-License-Identifier: BSD-3-Clause
"""The sentence on weights that are farther from the reference's than rounding explains."""

from __future__ import annotations

import math

_TIMES = 100.0  # as far as PyTorch's implementations are from each other
_ROUNDING = 1e-6  # of a parameter's size; these may be equal


def limit_of(spread: float) -> float:
    """The distance of a parameter, by its size, from which on it is wrong. spread: of PyTorch's
    implementations from each other in the same run."""
    return _TIMES * max(spread, _ROUNDING)


def sentence(
    name: str, label: str, reference: str, step: int, distance: float, spread: float
) -> str:
    far = f"is {distance:.2g} of its size away from {reference}'s"
    if not math.isfinite(distance):
        far = f"has NaN or infinities that {reference}'s has not"
    return (
        f"WEIGHTS ARE WRONG under {name}: after step {step} {label} {far} (PyTorch's "
        f"implementations are {spread:.2g} away from each other)"
    )
