# SPDX-License-Identifier: BSD-3-Clause
"""Section reorder: iterations under DistributedDataParallel in stock's order and in the one that
reorder(schedule="auto") chooses. The simulator, as "auto" asks it, names the network of each model
in which an order gains most, which is measured, behind a slow link. Two processes of one thread
each (this file, run with a rank); all variants interleaved."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from cells import LENGTH, iteration
from data import digit_batches, text_batches
from distributed import BUCKET_MB, LATENCY_MS, SYNC_BUFFERS
from figures import columns, of_medians, progress, title
from link import Link, Network, known_over_link
from models import GPT, MLP, VGG, Lifted, ResNet18
from pipeline_sleep import Sleeps
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from two_processes import WORLD, given, join, leave, pair

import optfuse
from optfuse_tools.ab.result import Interval, equal_bits, median_interval

STOCK, FAST, ALL, AUTO = "stock's order", "stock's order, no delay", "all last", "auto"
AWAITED = ", awaited at first use"
GBIT = (0.3, 0.6, 1.0, 1.5, 2.5, 4.0, 6.0, 10.0, 25.0)
FEWEST, MOST = 4, 100  # rounds
IMAGE = 64  # pixels


@dataclass(frozen=True)
class Model:
    build: Callable[[], nn.Module]
    batches: Callable[[], Iterator[tuple[Tensor, Tensor]]]
    iterations: int = 4  # a round


class Sleeping(nn.Module):
    """Layers between which the process sleeps, in forward and in backward, so that the gain hardly
    depends on other work of the machine."""

    def __init__(self, layers: int, seconds: float) -> None:
        super().__init__()
        widths = [64, *[1024] * layers]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.head = nn.Linear(1024, 10)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers:
            x = Sleeps.apply(torch.relu(layer(x)), self.seconds)
            time.sleep(self.seconds)
        return self.head(x)


MODELS = {
    "sleeping layers": Model(lambda: Sleeping(8, 0.02), lambda: digit_batches(16, 8, 1)),
    # 16,384 outputs of the first layer: it has 95 % of the bytes; convolutions compute.
    "lifted convolutions": Model(lambda: Lifted(16, 64, 6, 10), lambda: digit_batches(32, 16, 1)),
    # 12,288 inputs: the first layer has two thirds of the bytes.
    "wide MLP": Model(
        lambda: MLP(512, 12, 3 * IMAGE * IMAGE), lambda: digit_batches(256, IMAGE, 3)
    ),
    # The embedding has 40 % of the bytes, and its gradient comes last in stock's order.
    "GPT, 16,384 tokens": Model(lambda: GPT(16384, LENGTH), lambda: text_batches(2, LENGTH)),
    "ResNet-18": Model(lambda: ResNet18(10), lambda: digit_batches(4, IMAGE, 3)),
    "VGG": Model(lambda: VGG(10), lambda: digit_batches(8, IMAGE, 3)),
}


def layers_of(model: nn.Module) -> int:
    return sum(isinstance(m, nn.Linear | nn.Conv2d) for m in model.modules())


def variants_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Arguments of reorder() by the name of the variant."""
    last = {"schedule": "reverse_first", "k": layers_of(model)}
    at_end = {STOCK: {}, ALL: last, AUTO: {"schedule": "auto"}}
    awaited = {STOCK: {}, ALL: last, AUTO: {"schedule": "auto", "await_reduction": "first_use"}}
    return {FAST: {}, **at_end, **{n + AWAITED: c for n, c in awaited.items()}}


# One rank


def wrapped(way: Model) -> tuple[nn.Module, DistributedDataParallel]:
    torch.manual_seed(0)
    model = way.build()
    return model, DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, **{SYNC_BUFFERS: False})


def as_pair(network: Network) -> tuple[float, float]:
    """Seconds a message, and a byte."""
    return network.latency_ms / 1e3, network.ms_per_mb / 1e9


class Run:
    """One variant in training: a model and an optimizer of its own."""

    def __init__(self, name: str, way: Model, choice: dict[str, Any], link: Link) -> None:
        self.name, self.link = name, link
        self.model, model = wrapped(way)
        line = {"network": as_pair(link.network)} if name.startswith(AUTO) else {}
        self.reordering = optfuse.reorder(model, **choice, **line) if choice else None
        opt = torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9, fused=True)
        hook = link, known_over_link
        if name.endswith(AWAITED):
            opt = optfuse.fuse(opt, optfuse.Forward(ddp=optfuse.DDPModel(model, hook)))
        else:
            model.register_comm_hook(*hook)
        self.iterate = iteration(model, opt, way.batches())

    def turn(self, iterations: int) -> float:
        """Seconds, behind an iteration that brings the model back into the caches, and leaves to
        the next one as much to wait for as each does."""
        self.link.is_slow = self.name != FAST
        dist.barrier()
        self.iterate()
        began = time.perf_counter()
        for _ in range(iterations):
            self.iterate()
        took = time.perf_counter() - began
        optfuse.flush()
        return took


def measure(runs: list[Run], way: Model, seconds: float, most: int) -> dict[str, list[float]]:
    """Milliseconds an iteration of the slower rank, round by round."""
    found: dict[str, list[float]] = {run.name: [] for run in runs}
    shuffled, spent, rounds = random.Random(0), 0.0, 0
    gc.disable()
    for run in runs:
        run.turn(1)  # DistributedDataParallel orders its buckets anew in the second iteration
    while rounds < FEWEST or (spent < seconds and rounds < most):
        for run in shuffled.sample(runs, len(runs)):
            took = torch.tensor([run.turn(way.iterations)], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            found[run.name].append(1e3 * took.item() / way.iterations)
            spent += took.item()
        rounds += 1
        gc.collect()
    return found


def said(run: Run) -> dict[str, Any]:
    """The choice of "auto", and its simulation."""
    assert run.reordering is not None and run.reordering.times is not None
    times = run.reordering.times
    return {"k": times.k, "gain": times.stock / times.iteration, "exposed_ms": 1e3 * times.exposed}


def train(name: str, link: Link, options: dict[str, Any]) -> dict[str, Any]:
    way = MODELS[name]
    choices = variants_of(way.build())
    runs = [Run(variant, way, choice, link) for variant, choice in choices.items()]
    rounds = measure(runs, way, options["seconds"], options["rounds"])
    of = {run.name: run for run in runs}
    stock = [p.detach() for p in of[STOCK].model.parameters()]
    return {
        "rounds_ms": rounds,
        "equal_bits": all(
            equal_bits([p.detach() for p in r.model.parameters()], stock) for r in runs
        ),
        "auto": {n: said(r) for n, r in of.items() if n.startswith(AUTO)},
        "extra_bytes": {n: r.reordering.extra_bytes for n, r in of.items() if r.reordering},
        "buckets": link.buckets,
    }


def scan(name: str, gbits: list[float]) -> dict[str, Any]:
    """The gain that "auto" is told by the simulator, by networks; the first forward pass does."""
    way = MODELS[name]
    _, model = wrapped(way)
    x, _ = next(way.batches())
    found: dict[str, list[float]] = {"": [], AWAITED: []}
    for gbit in gbits:
        for awaited, gains in found.items():
            awaits = "first_use" if awaited else None
            network = as_pair(Network(LATENCY_MS, 8 / gbit))
            reordering = optfuse.reorder(model, "auto", network=network, await_reduction=awaits)
            model(x)
            times = reordering.times
            assert times is not None
            gains.append(times.stock / times.iteration)
            reordering.remove()
    return found


def work(rank: int, folder: str, name: str, options: dict[str, Any]) -> None:
    join(rank, folder)
    if "gbit" in options:
        found = scan(name, options["gbit"])
    else:
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
    gain: Interval  # times as fast as stock's order that waits at the same place
    extra_bytes: int
    chosen: dict[str, Any] | None  # of "auto"


@dataclass(frozen=True)
class Measured:
    model: str
    gbit: float
    simulated: float  # the gain by which this network was taken
    rounds: int
    on_the_link_ms: float
    equal_bits: bool
    lines: list[Line]


def figures(name: str, gbit: float, simulated: float, found: dict[str, Any]) -> Measured:
    rounds: dict[str, list[float]] = found["rounds_ms"]
    network = Network(LATENCY_MS, 8 / gbit)

    def line(variant: str) -> Line:
        own, fast = rounds[variant], rounds[FAST]
        stock = rounds[STOCK + AWAITED if variant.endswith(AWAITED) else STOCK]
        return Line(
            variant,
            median_interval(own),
            of_medians(lambda o, f: o - f, own, fast),
            of_medians(lambda s, o: s / o, stock, own),
            found["extra_bytes"].get(variant, 0),
            found["auto"].get(variant),
        )

    return Measured(
        model=name,
        gbit=gbit,
        simulated=simulated,
        rounds=len(rounds[STOCK]),
        on_the_link_ms=1e3 * sum(map(network.seconds, found["buckets"])),
        equal_bits=found["equal_bits"],
        lines=[line(variant) for variant in rounds],
    )


def table(one: Measured) -> str:
    rows = [("", "ms an iteration", "exposed ms", "x stock", "extra MB", "auto")]
    for line in one.lines:
        chosen = f"k={line.chosen['k']}, {line.chosen['gain']:.3f}" if line.chosen else ""
        rows.append(
            (line.name, str(line.ms), str(line.exposed_ms), str(line.gain),
             f"{line.extra_bytes / 1e6:.1f}", chosen)
        )  # fmt: skip
    return columns(rows)


def described(one: Measured) -> str:
    text = f"{one.model}, {one.gbit} Gbit/s: {one.rounds} rounds, {one.on_the_link_ms:.0f} ms on "
    text += f"the link; the simulator had found {one.simulated:.3f} times"
    return text if one.equal_bits else f"{text}; BITS DIFFER"


def scanned(name: str, gbits: list[float]) -> dict[str, list[float]]:
    found = pair(__file__, name, name, {"gbit": gbits})
    rows = [("Gbit/s", *map(str, gbits))]
    rows += [
        (f"auto{awaited}", *(f"{gain:.3f}" for gain in gains)) for awaited, gains in found.items()
    ]
    title(f"{name}, simulated: times as fast as stock's order")
    print(columns(rows), flush=True)
    return found


def named(found: dict[str, list[float]], gbits: list[float]) -> tuple[float, float]:
    """The network to measure, where the simulator finds most, and the gain."""
    gains = [max(pair) for pair in zip(*found.values(), strict=True)]
    best = max(range(len(gbits)), key=gains.__getitem__)
    return gbits[best], gains[best]


def section(chosen: Any) -> dict[str, Any]:
    options = {"seconds": chosen.seconds, "rounds": chosen.rounds or MOST}
    names = list(MODELS)[:1] if chosen.smoke else list(MODELS)
    gbits = list(GBIT[3:5] if chosen.smoke else GBIT)
    simulated, found = [], list[Measured]()
    for name in names:
        progress(name)
        gains = scanned(name, gbits)
        simulated.append({"model": name, "gbit": gbits, **gains})
        gbit, gain = named(gains, gbits)
        network = asdict(Network(LATENCY_MS, 8 / gbit))
        one = pair(__file__, name, name, options | {"network": network})
        found.append(figures(name, gbit, gain, one))
        title(described(found[-1]))
        print(table(found[-1]), flush=True)
    return {
        "processes": WORLD,
        "latency_ms": LATENCY_MS,
        "bucket_cap_mb": BUCKET_MB,
        "load_average": os.getloadavg()[1],  # of 5 minutes, with what ran beside
        "simulated": simulated,
        "measured": found,
    }


if __name__ == "__main__":
    work(*given())
