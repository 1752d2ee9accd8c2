# SPDX-License-Identifier: BSD-3-Clause
"""Sentences on the speed of a variant, and on weights that are farther from the reference's than
rounding explains."""

from __future__ import annotations

import math

from optfuse_tools.ab.interval import GAIN, LOSS, Interval

_TIMES = 100.0  # as far as PyTorch's implementations are from each other
_ROUNDING = 1e-6  # of a parameter's size; these may be equal


def times(ratio: float) -> str:
    """Two digits behind the point below 2, else one."""
    return f"{ratio:.2f}" if ratio < 1.995 else f"{ratio:.1f}"


def is_known(speed: Interval, rounds: int, fewest: int) -> bool:
    """Whether rounds and interval are such that the median means something."""
    return rounds >= fewest and not (speed.low <= LOSS and speed.high >= GAIN)


def on_speed(name: str, speed: Interval, base: str, rounds: int, fewest: int) -> str:
    """base: whose time by the variant's is the speed; fewest: rounds that a verdict takes."""
    said = f"{name} is {times(speed.median)} times as fast as {base}"
    bounds = f"{times(speed.low)} to {times(speed.high)}"
    many = "1 round, which is" if rounds == 1 else f"{rounds} rounds, which are"
    if rounds < fewest:
        return f"{said} in {many} too few to be sure: run more"
    if not is_known(speed, rounds, fewest):
        return f"{said}, or anything from {bounds} times: run more rounds, or a quieter machine"
    if speed.low <= 1.0 <= speed.high:
        return f"{name} is as fast as {base}, as far as can be seen ({bounds} times)"
    if speed.high < 1.0:
        return f"{name} is slower than {base}: {times(speed.median)} times as fast ({bounds})"
    return f"{said} ({bounds})"


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
