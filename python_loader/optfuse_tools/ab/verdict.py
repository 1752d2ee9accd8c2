# SPDX-License-Identifier: BSD-3-Clause
"""Sentences on the speed of a variant."""

from __future__ import annotations

from optfuse_tools.ab.interval import GAIN, LOSS, Interval


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
