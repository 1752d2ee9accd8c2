# SPDX-License-Identifier: BSD-3-Clause
"""Section kfac: what the messages of optfuse.kfac() cost behind a slow link, by how factors are
fused, and a whole iteration of the three schemes that the paper compares (arXiv 2107.06533). Two
processes of one thread each (this file, run with a rank); all variants interleaved."""

from __future__ import annotations

import gc
import random
import time
from dataclasses import asdict, dataclass
from functools import cache
from statistics import median
from typing import Any

import kfac_cost
import kfac_shapes
import slow_group
import torch
import torch.distributed as dist
from data import digit_batches
from figures import columns, progress, title
from kfac_shapes import FUSIONS, PAPERS_LINK, packed
from link import Network
from slow_group import SlowGroup
from torch import nn
from torch.nn.functional import cross_entropy
from two_processes import WORLD, given, join, leave, pair

import optfuse
from optfuse._ab.result import Interval, median_interval

WIDE, NARROW, BOTTLENECKS, IMAGE, BATCH = 1280, 96, 6, 32, 16
NETWORKS = (Network(5.0, PAPERS_LINK.ms_per_mb), PAPERS_LINK)
WARM_UP, TURN = 4, 2  # iterations, and pairs of them; messages are planned in the second
WAITED = 1  # where iterate() has it
FEWEST, MOST = 4, 60  # rounds
NEVER = 1 << 40
EVERYWHERE = {"inverses_every": NEVER, "placement": "everywhere"}
EXPOSURE = {name: {"fusion": name, **EVERYWHERE} for name in FUSIONS}
GIVEN = "planned, link given"  # else kfac() measures the link
EXPOSURE[GIVEN] = EXPOSURE["planned"]
SCHEMES = {
    "D-KFAC": {"fusion": "all", "placement": "everywhere", "inverses_every": 1},
    "MPD-KFAC": {"fusion": "all", "placement": "round_robin", "inverses_every": 1},
    "SPD-KFAC": {"fusion": "planned", "placement": "balanced", "inverses_every": 1},
}
JOBS = {"exposure": EXPOSURE, "schemes": SCHEMES}
CLOSE_SHARE, CLOSE_MS = 0.10, 3.0  # how far the simulator may be off


def build(wide: int = WIDE) -> nn.Sequential:
    """Wide and narrow layers in turn, as in a stack of autoencoders."""
    parts: list[nn.Module] = [nn.Flatten(), nn.Linear(IMAGE * IMAGE, wide), nn.Tanh()]
    for _ in range(BOTTLENECKS):
        parts += [nn.Linear(wide, NARROW), nn.Tanh(), nn.Linear(NARROW, wide), nn.Tanh()]
    return nn.Sequential(*parts, nn.Linear(wide, 10))


# One rank


class Run:
    """One variant in training: a model and an optimizer of its own. Both ranks have the same
    batches, so that gradients need no messages."""

    def __init__(self, options: dict[str, Any], wide: int) -> None:
        torch.manual_seed(0)
        self._model = build(wide)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3, momentum=0.9)
        self._optimizer.register_step_pre_hook(self._note_step)  # before that of kfac()
        how = {"process_group": dist.group.WORLD, "factors_every": 1, **options}
        self.kfac = optfuse.kfac(self._model, self._optimizer, **how)
        self._link = SlowGroup.made[-1].link
        self._batches = digit_batches(BATCH, IMAGE, 1)
        self._step_began = 0.0

    def _note_step(self, *_: Any) -> None:
        self._step_began = time.perf_counter()

    def iterate(self, is_slow: bool) -> list[float]:
        """Milliseconds: the whole, what step() waits for messages, and from the beginning to
        step() and to each message with factors."""
        x, y = next(self._batches)
        self._link.is_slow = is_slow
        self._link.log.clear()
        meet()
        began = time.perf_counter()
        self._optimizer.zero_grad()
        cross_entropy(self._model(x), y).backward()
        self._optimizer.step()
        took = time.perf_counter() - began
        # The factors' messages, then how many rows each process had.
        n, log = self.kfac.summary().messages, self._link.log
        waited = max(0.0, log[n - 1][1] - self._step_began) + log[n][1] - log[n][0]
        sent = [at - began for at, _ in log[:n]]
        return [1e3 * seconds for seconds in (took, waited, self._step_began - began, *sent)]

    def turn(self) -> list[list[list[float]]]:
        """Some pairs of iterations, behind the link and without its delay, of the slower rank.
        The other one waits for that rank, too, so that the shorter wait counts."""
        self.iterate(True)  # brings this variant back into the caches
        pairs = [[self.iterate(is_slow) for is_slow in (True, False)] for _ in range(TURN)]
        slower = torch.tensor(pairs, dtype=torch.float64)
        slower[..., WAITED] *= -1
        dist.all_reduce(slower, dist.ReduceOp.MAX, group=gloo())
        slower[..., WAITED] *= -1
        found: list[list[list[float]]] = slower.tolist()
        return found


@cache
def gloo() -> dist.ProcessGroup:
    """For what is no part of the training."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def meet() -> None:
    dist.barrier(gloo())


def measure(runs: dict[str, Run], seconds: float, most: int) -> dict[str, Any]:
    """Iteration by iteration, in pairs, behind the link and without its delay."""
    pairs: dict[str, list[list[list[float]]]] = {name: [] for name in runs}
    shuffled, spent, rounds = random.Random(0), 0.0, 0
    gc.disable()
    for run in runs.values():
        for _ in range(WARM_UP):
            run.iterate(True)
    while rounds < min(FEWEST, most) or (spent < seconds and rounds < most):
        for name in shuffled.sample(list(runs), len(runs)):
            done = runs[name].turn()
            pairs[name] += done
            spent += sum(slow[0] + fast[0] for slow, fast in done) / 1e3
        rounds += 1
        gc.collect()
    return {
        "rounds": rounds,
        "slow": {name: [slow[0] for slow, _ in of] for name, of in pairs.items()},
        "fast": {name: [fast[0] for _, fast in of] for name, of in pairs.items()},
        "waited": {name: [slow[WAITED] for slow, _ in of] for name, of in pairs.items()},
        "ready": {name: [median(at) for at in zip(*(fast[2:] for _, fast in of), strict=True)]
                  for name, of in pairs.items()},
    }  # fmt: skip


def train(job: str, options: dict[str, Any]) -> dict[str, Any]:
    gloo()
    network = Network(**options["network"])
    given = {"network": (network.latency_ms / 1e3, network.ms_per_mb / 1e9)}
    runs = {
        name: Run({**how, **(given if name == GIVEN else {})}, options["wide"])
        for name, how in JOBS[job].items()
    }
    found = measure(runs, options["seconds"], options["rounds"])
    states = {name: run.kfac.state_dict() for name, run in runs.items()}
    sizes = [d for both in next(iter(runs.values())).kfac.summary().preconditioned.values()
             for d in both]  # fmt: skip
    meet()
    return {
        **found,
        "sizes": sizes,
        "order": {name: state["order"] for name, state in states.items()},
        "group": {name: state["group"] for name, state in states.items()},
    }


def work(rank: int, folder: str, job: str, options: dict[str, Any]) -> None:
    slow_group.register()
    SlowGroup.network = Network(**options["network"])
    join(rank, folder, slow_group.NAME)
    found = train(job, options)
    for group in SlowGroup.made:
        group.link.close()
    leave(rank, found)


# Both ranks together


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
    finish = 1e3 * torch.ops.optfuse.fused_finish(at, messages, group, *line)
    rows = 8 * 4 * len(sizes) // 2  # then four numbers a layer, of which all wait for
    return float(max(0.0, finish - step) + 1e3 * network.seconds(rows))


def figures(job: str, network: Network, found: dict[str, Any]) -> Measured:
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
    return Measured(
        job, network, found["rounds"], 1e3 * network.seconds(total), list(map(line, names))
    )


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
        f"{one.job}, a = {one.network.latency_ms:g} ms: {one.rounds} rounds; all factors in one "
        f"message take {one.on_the_link_ms:.1f} ms"
    )


def section(chosen: Any) -> dict[str, Any]:
    options = {"seconds": chosen.seconds, "rounds": chosen.rounds or MOST, "wide": WIDE}
    found: list[Measured] = []
    for job in JOBS:
        for network in NETWORKS[:1] if chosen.smoke else NETWORKS:
            progress(f"{job}, {network}")
            both = pair(__file__, job, job, {**options, "network": asdict(network)})
            found.append(figures(job, network, both))
            title(described(found[-1]))
            print(table(found[-1]), flush=True)
    large = kfac_shapes.simulated()
    title(f"ResNet-50 on {kfac_shapes.PROCESSES} processes, simulated")
    print(columns(kfac_shapes.table(large)), flush=True)
    costs = kfac_cost.costs(chosen)
    return {"processes": WORLD, "measured": found, "resnet_50": large, "costs": costs}


if __name__ == "__main__":
    work(*given())
