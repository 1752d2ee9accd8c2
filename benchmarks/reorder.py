# SPDX-License-Identifier: BSD-3-Clause
"""Section reorder: what communication costs under DistributedDataParallel when the weight
gradients of the first k layers run last, over k, behind a slow link. Two processes of one thread
each (this file, run with a rank); all variants interleaved."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from cells import LENGTH, iteration
from data import digit_batches, text, text_batches
from distributed import BUCKET_MB, LATENCY_MS, SYNC_BUFFERS
from figures import columns, of_medians, progress, title
from link import Link, Network, mean_over_link
from models import GPT, MLP, VGG, ResNet18
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from two_processes import WORLD, given, join, leave, pair

import optfuse
from optfuse._ab.result import Interval, equal_bits, median_interval

STOCK, FAST, AUTO = "stock's order", "stock's order, no delay", "auto"
AWAITED = ", awaited at first use"
GRADES = 3  # of k, up to all layers
CHOOSING = 8  # iterations until "auto" has chosen
FEWEST, MOST = 4, 100  # rounds
IMAGE = 64  # pixels


@dataclass(frozen=True)
class Model:
    build: Callable[[], nn.Module]
    batches: Callable[[], Iterator[tuple[Tensor, Tensor]]]
    iterations: int = 4  # a round


MODELS = {
    # 12,288 inputs: the first layer has two thirds of the bytes.
    "wide MLP": Model(
        lambda: MLP(512, 12, 3 * IMAGE * IMAGE), lambda: digit_batches(768, IMAGE, 3), 1
    ),
    "ResNet-18": Model(lambda: ResNet18(10), lambda: digit_batches(4, IMAGE, 3)),
    "VGG": Model(lambda: VGG(10), lambda: digit_batches(8, IMAGE, 3)),
    "GPT": Model(lambda: GPT(len(text()[1]), LENGTH), lambda: text_batches(2, LENGTH)),
}


def layers_of(model: nn.Module) -> int:
    return sum(isinstance(m, nn.Linear | nn.Conv2d) for m in model.modules())


def variants_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Arguments of reorder() by the name of the variant."""
    n = layers_of(model)
    ks = [round(n * i / GRADES) for i in range(1, GRADES + 1)]
    of_k = {f"k={k}": {"schedule": "reverse_first", "k": k} for k in ks}
    at_end = {STOCK: {}, **of_k, AUTO: {"schedule": "auto"}}
    return {FAST: {}, **at_end, **{n + AWAITED: c for n, c in at_end.items() if n != AUTO}}


# One rank


class Run:
    """One variant in training: a model and an optimizer of its own."""

    def __init__(self, name: str, way: Model, choice: dict[str, Any], link: Link) -> None:
        torch.manual_seed(0)
        self.name, self.link = name, link
        self.model = way.build()
        how = {"bucket_cap_mb": BUCKET_MB, SYNC_BUFFERS: False}
        wrapped = DistributedDataParallel(self.model, **how)
        network = link.network
        line = network.latency_ms / 1e3, network.ms_per_mb / 1e9
        auto = {"network": line} if name == AUTO else {}
        self.reordering = optfuse.reorder(wrapped, **choice, **auto) if choice else None
        opt = torch.optim.SGD(wrapped.parameters(), lr=3e-3, momentum=0.9, fused=True)
        hook = link, mean_over_link
        if name.endswith(AWAITED):
            opt = optfuse.fuse(opt, optfuse.Forward(ddp=optfuse.DDPModel(wrapped, hook)))
        else:
            wrapped.register_comm_hook(*hook)
        self.iterate = iteration(wrapped, opt, islice(way.batches(), dist.get_rank(), None, WORLD))

    def turn(self, iterations: int) -> float:
        """Seconds."""
        self.link.is_slow = self.name != FAST
        dist.barrier()
        began = time.perf_counter()
        for _ in range(iterations):
            self.iterate()
        optfuse.flush()
        return time.perf_counter() - began


def measure(runs: list[Run], way: Model, seconds: float, most: int) -> dict[str, list[float]]:
    """Milliseconds an iteration of the slower rank, round by round."""
    found: dict[str, list[float]] = {run.name: [] for run in runs}
    shuffled, spent, rounds = random.Random(0), 0.0, 0
    gc.disable()
    for run in runs:
        run.turn(CHOOSING)
    while rounds < FEWEST or (spent < seconds and rounds < most):
        for run in shuffled.sample(runs, len(runs)):
            run.turn(1)  # brings this variant's model back into the caches
            took = torch.tensor([run.turn(way.iterations)], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            found[run.name].append(1e3 * took.item() / way.iterations)
            spent += took.item() * 1.5
        rounds += 1
        gc.collect()
    return found


def train(name: str, link: Link, options: dict[str, Any]) -> dict[str, Any]:
    way = MODELS[name]
    choices = variants_of(way.build())
    runs = [Run(variant, way, choice, link) for variant, choice in choices.items()]
    rounds = measure(runs, way, options["seconds"], options["rounds"])
    of = {run.name: run for run in runs}
    stock = [p.detach() for p in of[STOCK].model.parameters()]
    auto = of[AUTO].reordering
    assert auto is not None and auto.times is not None
    return {
        "rounds_ms": rounds,
        "layers": layers_of(of[STOCK].model),
        "equal_bits": all(
            equal_bits([p.detach() for p in r.model.parameters()], stock) for r in runs
        ),
        "chosen": auto.plan.choice["k"],
        "simulated_ms": 1e3 * auto.times.exposed,
        "extra_bytes": {n: r.reordering.extra_bytes for n, r in of.items() if r.reordering},
        "buckets": link.buckets,
    }


def work(rank: int, folder: str, name: str, options: dict[str, Any]) -> None:
    join(rank, folder)
    link = Link(Network(**options["network"]))
    found = train(name, link, options)
    dist.barrier()
    link.close()
    leave(rank, found)


# Both ranks together


@dataclass(frozen=True)
class Line:
    """One variant of one model."""

    name: str
    ms: Interval
    exposed_ms: Interval  # above stock's order without delay
    falls: Interval | None  # the share of stock's exposed communication that is gone
    extra_bytes: int


@dataclass(frozen=True)
class Measured:
    model: str
    rounds: int
    layers: int
    on_the_link_ms: float
    equal_bits: bool
    chosen: int  # k of "auto"
    simulated_exposed_ms: float  # of that k
    auto_to_best: float  # its iteration by that of the best k
    lines: list[Line]


def figures(name: str, network: Network, found: dict[str, Any]) -> Measured:
    rounds: dict[str, list[float]] = found["rounds_ms"]
    fast, stock = rounds[FAST], rounds[STOCK]

    def line(variant: str) -> Line:
        own = rounds[variant]
        falls = of_medians(lambda s, o, f: (s - o) / (s - f), stock, own, fast)
        extra = found["extra_bytes"].get(variant, 0)
        exposed = of_medians(lambda o, f: o - f, own, fast)
        is_late = variant not in (FAST, STOCK)
        return Line(variant, median_interval(own), exposed, falls if is_late else None, extra)

    at_end = [own for v, own in rounds.items() if v not in (FAST, AUTO) and AWAITED not in v]
    best = min(map(median, at_end))
    return Measured(
        model=name,
        rounds=len(stock),
        layers=found["layers"],
        on_the_link_ms=1e3 * sum(map(network.seconds, found["buckets"])),
        equal_bits=found["equal_bits"],
        chosen=found["chosen"],
        simulated_exposed_ms=found["simulated_ms"],
        auto_to_best=median(rounds[AUTO]) / best,
        lines=[line(variant) for variant in rounds],
    )


def table(one: Measured) -> str:
    rows = [("", "ms an iteration", "exposed ms", "falls by", "extra MB")]
    for line in one.lines:
        rows.append(
            (line.name, str(line.ms), str(line.exposed_ms), str(line.falls or ""),
             f"{line.extra_bytes / 1e6:.1f}")
        )  # fmt: skip
    return columns(rows)


def described(one: Measured) -> str:
    said = f"{one.model}, {one.layers} layers: {one.rounds} rounds, {one.on_the_link_ms:.0f} ms on "
    said += f"the link; auto took k={one.chosen}, simulated {one.simulated_exposed_ms:.0f} ms "
    said += f"exposed, {one.auto_to_best:.2f} times the best k's iteration"
    return said if one.equal_bits else f"{said}; BITS DIFFER"


def section(chosen: Any) -> dict[str, Any]:
    network = Network(LATENCY_MS, ms_per_mb=8 / chosen.gbit)
    options = {"seconds": chosen.seconds, "rounds": chosen.rounds or MOST}
    options["network"] = asdict(network)
    found: list[Measured] = []
    names = list(MODELS)[:1] if chosen.smoke else list(MODELS)
    for name in names:
        progress(name)
        found.append(figures(name, network, pair(__file__, name, name, options)))
        title(described(found[-1]))
        print(table(found[-1]), flush=True)
    return {"processes": WORLD, "network": network, "bucket_cap_mb": BUCKET_MB, "models": found}


if __name__ == "__main__":
    work(*given())
