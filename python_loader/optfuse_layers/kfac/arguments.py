# SPDX-License-Identifier: BSD-3-Clause
"""The kinds of values that kfac() takes for each argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from optfuse._arguments.check import (
    LAYER_NAMES,
    MODEL,
    NETWORK_AND_PROCESSOR,
    OPTIMIZER,
    PROCESS_GROUP,
    Kind,
    need,
    number,
    one_of,
    optional,
    whole,
)
from optfuse_layers.kfac.inverses import PLACEMENTS
from optfuse_layers.kfac.messages import FUSIONS


def _within(expected: str, fits: Callable[[float], bool]) -> Kind:
    take = number(expected, 0.0).take

    def take_some(value: Any) -> float:
        found: float = take(value)
        need(math.isfinite(found) and fits(found))
        return found

    return Kind(expected, take_some)


def _or_function(kind: Kind) -> Kind:
    """Or a function of the step that gives one, at which kfac() looks when it is called."""
    return Kind(
        f"{kind.expected}, or a function of the step",
        lambda value: value if callable(value) else kind.take(value),
    )


def _rows(value: Any) -> list[float]:
    need(isinstance(value, list | tuple) and len(value) > 0)
    found = list(map(number("", 0.0).take, value))
    need(all(math.isfinite(n) and n > 0 for n in found))
    return found


def _fusion() -> Kind:
    name, size = one_of(*FUSIONS), whole("a number of bytes, at least 1", 1)
    return Kind(
        f"{name.expected} or {size.expected}",
        lambda value: name.take(value) if isinstance(value, str) else size.take(value),
    )


POSITIVE = _within("a number above 0", lambda n: n > 0)
STEPS = whole("a number of steps, at least 1", 1)

OPTIONS = {
    "model": MODEL,
    "optimizer": OPTIMIZER,
    "damping": _or_function(POSITIVE),
    "decay": _within("a number from 0 to below 1", lambda n: n < 1),
    "kl_clip": optional(POSITIVE),
    "factors_every": _or_function(STEPS),
    "inverses_every": _or_function(STEPS),
    "process_group": optional(PROCESS_GROUP),
    "fusion": _fusion(),
    "placement": one_of(*PLACEMENTS),
    "skip": LAYER_NAMES,
    "split": optional(one_of("pi")),
    "missing": one_of("error", "skip"),
    "rows": optional(Kind("a list of samples, one number above 0 a process", _rows)),
    "network": optional(NETWORK_AND_PROCESSOR),
}
