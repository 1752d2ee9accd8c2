# SPDX-License-Identifier: BSD-3-Clause
"""K-FAC of ResNet-50 on 64 processes, simulated with the planners of optfuse.kfac(), beside the
measured stages of the authors (SPD-KFAC, arXiv 2107.06533: 64 GPUs 2080 Ti, 32 images each), whose
sums are the seconds of an iteration that the paper gives.

Taken from the authors, and so no prediction: seconds of passes, of the exposed part of gradients,
of computing factors and of all inverses on one process; the link a + b m. Computing is spread over
layers by its operations, an inverse takes c d^3. Broadcasts use the same link as all-reduces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import isclose
from typing import Any

import torch
from link import Network

PROCESSES, BYTES = 64, 4
PAPERS_LINK = Network(0.929, 1.4335e-9 / BYTES * 1e9)
FUSIONS = ("each", "all", "threshold", "paper", "planned")
THRESHOLD = 25 << 20  # of optfuse.kfac()
EVERYWHERE_BELOW = 1024
#: Seconds of ResNet-50's stages.
PASSES, GRADIENTS, FACTORS, INVERSES = 0.132, 0.0648, 0.2115, 0.2742


@dataclass(frozen=True)
class Scheme:
    fusion: str
    placement: int  # of_placement
    everywhere_below: int
    paper: tuple[float, float, float]  # seconds of factors' messages and inverses exposed; in all


SCHEMES = {
    "D-KFAC": Scheme("all", 2, 0, (0.1700, 0.2742, 0.8525)),
    "MPD-KFAC": Scheme("all", 1, 0, (0.1700, 0.1852, 0.7635)),
    "SPD-KFAC": Scheme("planned", 0, EVERYWHERE_BELOW, (0.0981, 0.1691, 0.6755)),
}


@dataclass(frozen=True)
class Layer:
    inputs: int  # d of A
    outputs: int  # d of G
    positions: int

    @property
    def work(self) -> int:
        return self.inputs * self.outputs * self.positions


def resnet50() -> list[Layer]:
    """For images of 224 x 224, in the order of the forward pass."""
    layers = [Layer(3 * 49, 64, 112**2)]
    channels, extent = 64, 56
    for i, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << i
        for block in range(blocks):
            before = extent
            extent = extent // 2 if i and not block else extent
            layers.append(Layer(channels, width, before**2))
            layers.append(Layer(9 * width, width, extent**2))
            layers.append(Layer(width, 4 * width, extent**2))
            if not block:
                layers.append(Layer(channels, 4 * width, extent**2))
            channels = 4 * width
    return [*layers, Layer(channels + 1, 1000, 1)]


def packed(d: int) -> int:
    return d * (d + 1) // 2


def ready_times(layers: Sequence[Layer]) -> list[float]:
    """When the factors are ready: A, forward, then G, backward. A layer's factor is computed before
    its pass."""
    work = sum(layer.work for layer in layers)
    squares = sum(la.positions * (la.inputs**2 + la.outputs**2) for la in layers)

    def spent() -> Iterator[tuple[float, float]]:
        """Until a factor is ready, and after that."""
        for la in layers:
            yield FACTORS * la.positions * la.inputs**2 / squares, PASSES / 3 * la.work / work
        for la in reversed(layers):
            yield FACTORS * la.positions * la.outputs**2 / squares, PASSES / 1.5 * la.work / work

    each = list(spent())
    ends = list(accumulate(before + after for before, after in each))
    assert isclose(ends[-1], PASSES + FACTORS)
    return [end - after for end, (_, after) in zip(ends, each, strict=True)]


def exposed_factors(fusion: str, network: Network) -> float:
    """Seconds between the end of the backward pass and the last message."""
    layers = resnet50()
    sizes = [la.inputs for la in layers] + [la.outputs for la in reversed(layers)]
    messages = [BYTES * packed(d) for d in sizes]
    ready, line = ready_times(layers), (network.latency_ms / 1e3, network.ms_per_mb / 1e9)
    if fusion == "all":  # after the backward pass, as the paper's baselines
        ready = [PASSES + FACTORS] * len(messages)
    ops = torch.ops.optfuse
    group = ops.fuse_messages(FUSIONS.index(fusion), ready, messages, *line, 0.0, THRESHOLD)
    return max(0.0, fused_finish(ready, messages, group, line) - PASSES - FACTORS)


def fused_finish(
    ready: Sequence[float], sizes: Sequence[int], group: Sequence[int], link: tuple[float, float]
) -> float:
    """When the last message is through, in seconds: each waits for its last part and for the
    message before it."""
    latest, through = 0.0, 0.0
    parts = sorted(zip(group, ready, sizes, strict=True), key=lambda part: part[0])
    for _, members in groupby(parts, key=lambda part: part[0]):
        of = list(members)
        latest = max(latest, *(at for _, at, _ in of))
        through = max(through, latest) + link[0] + link[1] * sum(size for *_, size in of)
    return through


def inverses(scheme: Scheme, network: Network) -> float:
    """Seconds until every process has all inverses."""
    sizes = [d for la in resnet50() for d in (la.inputs, la.outputs)]
    cubic = INVERSES / sum(d**3 for d in sizes)
    latency, per_byte = network.latency_ms / 1e3, network.ms_per_mb / 1e9
    owner: list[int] = torch.ops.optfuse.place_inverses(
        scheme.placement, sizes, PROCESSES, scheme.everywhere_below
    )
    # Each process inverts its own from the smallest on, and then those of all. Broadcasts share a
    # link, in the same order.
    now, through, everywhere = [0.0] * PROCESSES, 0.0, 0.0
    for d, process in sorted(zip(sizes, owner, strict=True), key=lambda one: one[0]):
        if process < 0:
            everywhere += cubic * d**3
            continue
        now[process] += cubic * d**3
        through = max(through, now[process]) + latency + per_byte * BYTES * packed(d)
    return max(through, max(now) + everywhere)


def simulated() -> dict[str, Any]:
    lines = []
    for name, scheme in SCHEMES.items():
        ours = exposed_factors(scheme.fusion, PAPERS_LINK), inverses(scheme, PAPERS_LINK)
        total = PASSES + GRADIENTS + FACTORS + sum(ours)
        lines.append({"name": name, "simulated_s": [*ours, total], "paper_s": scheme.paper})
    slower = Network(5.0, PAPERS_LINK.ms_per_mb)
    exposed = {f: [exposed_factors(f, n) for n in (PAPERS_LINK, slower)] for f in FUSIONS}
    return {"processes": PROCESSES, "schemes": lines, "exposed_factors_s": exposed}


def table(found: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = [("simulated s (the paper's)", "factors exposed", "inverses exposed", "an iteration")]
    for line in found["schemes"]:
        both = zip(line["simulated_s"], line["paper_s"], strict=True)
        rows.append((line["name"], *(f"{ours:.4f} ({paper:.4f})" for ours, paper in both)))
    return rows
