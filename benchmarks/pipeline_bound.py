# SPDX-License-Identifier: BSD-3-Clause
"""How short a batch can be on so many processes: of any schedule, and of the best placement of the
kind that LayerPipe's paper (arXiv 2108.06629) has. Messages cost nothing here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from optfuse.pipeline import PlannedLayer
from optfuse_layers.pipeline.plan import SPLIT_MULTIPLE

ROUNDING = 1 + 1e-12
#: In which order a layer's F (with the update), dW and dX may be put; X, Y: the parts of dX.
ORDERS = [*permutations("FWX"), *(o for o in permutations("FWXY") if o.index("X") < o.index("Y"))]

Filled = tuple[int, float]  # a process, and its load: those before it are full


def loads(row: Sequence[PlannedLayer]) -> list[float]:
    """Seconds of each layer's tasks. The first layer with weights has no dX, nor those before."""
    first = next(i for i, layer in enumerate(row) if layer.parameters)
    return [
        layer.forward + layer.weight_gradient + layer.update + layer.input_gradient * (i > first)
        for i, layer in enumerate(row)
    ]


def least(row: Sequence[PlannedLayer], processes: int) -> float:
    """Seconds a batch of no schedule are fewer, whatever it splits, replicates or delays: each
    process then works all the time."""
    return sum(loads(row)) / processes


def best_placement(row: Sequence[PlannedLayer], processes: int) -> float:
    """The smallest load of the process that has most, if layers are put one behind the other, F and
    dW are whole, and dX is whole or has two parts. Exact, but for 2^-40 of its range: of each layer
    all orders are tried, and less on the same process, or an earlier process, leaves more room."""
    low, high = least(row, processes), sum(loads(row))
    for _ in range(40):
        middle = (low + high) / 2
        if fits(row, processes, middle):
            high = middle
        else:
            low = middle
    return high


def fits(row: Sequence[PlannedLayer], processes: int, limit: float) -> bool:
    filled = (0, 0.0)
    for layer, whole in zip(row, loads(row), strict=True):
        ways = list(_ways(layer, whole, filled, limit))
        if not ways:
            return False
        filled = min(ways)
        if filled[0] >= processes:
            return False
    return True


def _ways(layer: PlannedLayer, whole: float, filled: Filled, limit: float) -> Iterator[Filled]:
    if whole <= limit * ROUNDING:
        yield _put(whole, filled, limit)
    if not layer.movable:
        return
    gradient = whole - layer.forward - layer.weight_gradient - layer.update
    seconds = {"F": layer.forward + layer.update, "W": layer.weight_gradient, "X": gradient}
    for order in ORDERS:
        found = _placed(layer, order, dict(seconds), filled, limit)
        if found is not None:
            yield found


def _placed(
    layer: PlannedLayer,
    order: Sequence[str],
    seconds: dict[str, float],
    filled: Filled,
    limit: float,
) -> Filled | None:
    for kind in order:
        if kind == "X" and "Y" in order:
            part = _first_part(layer, seconds["X"], limit * ROUNDING - filled[1])
            if not part:
                return None
            seconds["Y"] = seconds["X"] - part
            filled = filled[0], filled[1] + part
            first = filled[0]
        elif seconds[kind] > limit * ROUNDING:
            return None
        else:
            filled = _put(seconds[kind], filled, limit)
            if kind == "Y" and filled[0] == first:
                return None  # whole
    return filled


def _put(seconds: float, filled: Filled, limit: float) -> Filled:
    process, load = filled
    return (
        (process, load + seconds) if load + seconds <= limit * ROUNDING else (process + 1, seconds)
    )


def _first_part(layer: PlannedLayer, whole: float, room: float) -> float:
    """As much of dX as fits, in steps of some channels."""
    if whole <= 0 or room <= 0:
        return 0.0
    most = (layer.channels - 1) // SPLIT_MULTIPLE
    steps = min(most, int(room / whole * layer.channels / SPLIT_MULTIPLE))
    return whole * steps * SPLIT_MULTIPLE / layer.channels
