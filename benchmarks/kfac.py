# SPDX-License-Identifier: BSD-3-Clause
"""Section kfac: what the messages of optfuse.kfac() cost behind a slow link, by how factors are
fused, and a whole iteration of the three schemes that the paper compares (arXiv 2107.06533). Two
processes of one thread each (kfac_rank.py)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import kfac_cost
import kfac_rank
import kfac_shapes
from figures import columns, progress, title
from kfac_rank import MOST, STACKS
from kfac_shapes import PAPERS_LINK, fused_finish, packed
from link import Network
from two_processes import WORLD, pair

from optfuse_tools.ab.result import Interval, median_interval

NETWORKS = (Network(5.0, PAPERS_LINK.ms_per_mb), PAPERS_LINK)
WIDE, DEEP = STACKS
CASES = [("exposure", WIDE), ("exposure", DEEP), ("schemes", WIDE)]
CLOSE_SHARE, CLOSE_MS = 0.10, 3.0  # how far the simulator may be off


@dataclass(frozen=True)
class Line:
    """One variant behind one network."""

    name: str
    messages: int
    ms: Interval
    no_delay_ms: Interval  # the same variant
    exposed_ms: Interval  # the median of the differences of pairs
    waited_ms: Interval  # from the beginning of step() to the factors' last message, then for rows
    simulated_ms: float | None  # to be waited for


@dataclass(frozen=True)
class Measured:
    job: str
    stack: str
    network: Network
    rounds: int
    on_the_link_ms: float  # all factors in one message
    lines: list[Line]


def simulated(found: dict[str, Any], name: str, network: Network) -> float:
    """Milliseconds that step() waits for messages, by the ready times that were measured without
    delay where each factor is a message."""
    step, *ready = found["ready"]["each"]
    order, group, sizes = found["order"]["each"], found["group"][name], found["sizes"]
    if found["order"][name] != order:
        raise RuntimeError(f"{name} sends factors in another order")
    line = network.latency_ms / 1e3, network.ms_per_mb / 1e9
    messages = [4 * packed(sizes[slot]) for slot in order]
    at = [ms / 1e3 for ms in ready]
    finish = 1e3 * fused_finish(at, messages, group, line)
    rows = 8 * 4 * len(sizes) // 2  # then four numbers a layer, of which all wait for
    return float(max(0.0, finish - step) + 1e3 * network.seconds(rows))


def figures(job: str, stack: str, network: Network, found: dict[str, Any]) -> Measured:
    def line(name: str) -> Line:
        slow, fast = found["slow"][name], found["fast"][name]
        return Line(
            name=name,
            messages=found["group"][name][-1] + 1,
            ms=median_interval(slow),
            no_delay_ms=median_interval(fast),
            exposed_ms=median_interval([s - f for s, f in zip(slow, fast, strict=True)]),
            waited_ms=median_interval(found["waited"][name]),
            simulated_ms=simulated(found, name, network) if job == "exposure" else None,
        )

    names = list(found["slow"])
    total = sum(4 * packed(d) for d in found["sizes"])
    all_at_once = 1e3 * network.seconds(total)
    return Measured(job, stack, network, found["rounds"], all_at_once, list(map(line, names)))


def is_close(simulated_ms: float, ms: float) -> bool:
    return abs(simulated_ms - ms) <= max(CLOSE_SHARE * ms, CLOSE_MS)


def table(one: Measured) -> str:
    rows = [("", "messages", "ms an iteration", "no delay", "exposed", "waited", "simulated")]
    for line in one.lines:
        said = "" if line.simulated_ms is None else f"{line.simulated_ms:.1f}"
        close = [
            "=" if is_close(line.simulated_ms, of.median) else "differs"
            for of in (line.exposed_ms, line.waited_ms)
            if line.simulated_ms is not None
        ]
        rows.append(
            (line.name, str(line.messages), str(line.ms), str(line.no_delay_ms),
             str(line.exposed_ms), str(line.waited_ms), " ".join([said, *close]))
        )  # fmt: skip
    return columns(rows)


def described(one: Measured) -> str:
    return (
        f"{one.job}, {one.stack}, a = {one.network.latency_ms:g} ms: {one.rounds} rounds; all "
        f"factors in one message take {one.on_the_link_ms:.1f} ms"
    )


def section(chosen: Any) -> dict[str, Any]:
    options = {"seconds": chosen.seconds, "rounds": chosen.rounds or MOST}
    found: list[Measured] = []
    for job, stack in CASES:
        for network in NETWORKS[:1] if chosen.smoke else NETWORKS:
            progress(f"{job}, {stack}, {network}")
            how = {**options, "stack": asdict(STACKS[stack]), "network": asdict(network)}
            found.append(figures(job, stack, network, pair(kfac_rank.__file__, job, job, how)))
            title(described(found[-1]))
            print(table(found[-1]), flush=True)
    large = kfac_shapes.simulated()
    title(f"ResNet-50 on {kfac_shapes.PROCESSES} processes, simulated")
    print(columns(kfac_shapes.table(large)), flush=True)
    costs = kfac_cost.costs(chosen)
    return {"processes": WORLD, "measured": found, "resnet_50": large, "costs": costs}
