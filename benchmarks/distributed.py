# SPDX-License-Identifier: BSD-3-Clause
"""Section distributed: what the optimizer costs behind a network. Two processes of one thread
each (this file, run with a rank) train under DistributedDataParallel over a slow link, all
variants interleaved; with --fsdp also under fully_shard, over gloo as it is."""

from __future__ import annotations

import gc
import inspect
import random
import sys
import time
from dataclasses import asdict, dataclass
from itertools import islice
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from cells import MODELS, OPTIMIZERS, Cell, batches, iteration
from compare import in_time
from figures import FUSED, NONE, OURS, columns, of_medians, progress, share, title
from link import Link, Network, mean_over_link
from models import Block, Residual
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from two_processes import WORLD, given, join, leave, pair
from variants import FOREACH

import optfuse
from optfuse_tools.ab.result import Interval, equal_bits, median_interval
from optfuse_tools.ab.variants import VARIANTS, Iteration

LATENCY_MS = 0.1
BEHIND = 0.2  # the share of exposed communication from which on a network is the bottleneck
GOAL = 0.9  # of what can hide, all but the last bucket
FAST = "no optimizer, no delay"
LATE = "forward fusion, awaited at first use"
FUSIONS = (*OURS, LATE)
DDP_VARIANTS = (FAST, NONE, FUSED, *FUSIONS)
FSDP_VARIANTS = (NONE, FOREACH, FUSED, *OURS)
CELLS = tuple(
    Cell(model, batch, n)
    for model, batch, n in (
        ("MLP", 8, 4),
        ("ResNet-18", 1, 3),
        ("GPT", 1, 3),
        ("MLP", 128, 3),
        ("ResNet-18", 8, 2),
        ("GPT", 8, 1),
    )
)
QUICK_CELLS = CELLS[:3]
SMOKE = Cell("MLP", 8, 1)
BUCKET_MB = 2  # for at least eight buckets in each model
SHARDED = {"MLP": nn.Linear, "ResNet-18": Residual, "GPT": Block}  # beside the model itself
# Batch norm's buffers stay each rank's own: they would be messages past the link.
NEWER = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
SYNC_BUFFERS = "forward_sync_buffers" if NEWER else "broadcast_buffers"
FEWEST, MOST = 2, 200  # rounds


# One rank


class Run:
    """One variant in training: a model and an optimizer of its own."""

    def __init__(self, name: str, cell: Cell, optimizer: str, link: Link | None) -> None:
        torch.manual_seed(0)
        self.name, self.link = name, link  # None: with FSDP2
        self.model = MODELS[cell.model]()
        build = data_parallel if link else sharded
        model, opt = build(self, cell, optimizer)
        stream = islice(batches(cell), dist.get_rank(), None, WORLD)
        self._iterate: Iteration = iteration(model, opt, stream)

    def turn(self, iterations: int) -> float:
        """Seconds of some iterations with all their updates done."""
        if self.link:
            self.link.is_slow = self.name != FAST
        dist.barrier()
        began = time.perf_counter()
        for _ in range(iterations):
            self._iterate()
        optfuse.flush()
        return time.perf_counter() - began


def data_parallel(run: Run, cell: Cell, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    how = {"bucket_cap_mb": BUCKET_MB, SYNC_BUFFERS: False}
    model = DistributedDataParallel(run.model, **how)
    opt, hook = OPTIMIZERS[optimizer](model.parameters()), (run.link, mean_over_link)
    if run.name == "backward fusion":
        return model, optfuse.fuse(opt, optfuse.Backward(ddp=optfuse.DDPModel(model, hook)))
    if run.name == LATE:
        return model, optfuse.fuse(opt, optfuse.Forward(ddp=optfuse.DDPModel(model, hook)))
    model.register_comm_hook(*hook)
    return model, VARIANTS[NONE if run.name == FAST else run.name](opt)


def sharded(run: Run, cell: Cell, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for part in [m for m in run.model.modules() if isinstance(m, SHARDED[cell.model])]:
        fully_shard(part, mesh=mesh)
    model = fully_shard(run.model, mesh=mesh)
    return model, VARIANTS[run.name](OPTIMIZERS[optimizer](model.parameters()))


def measure(runs: list[Run], iterations: int, seconds: float, most: int) -> dict[str, list[float]]:
    """Milliseconds an iteration of the slower rank, round by round. Both ranks add up the same
    times, so that they end after the same round."""
    found: dict[str, list[float]] = {run.name: [] for run in runs}
    shuffled, spent = random.Random(0), 0.0
    gc.disable()
    for run in runs * 2:  # DDP orders its buckets anew after the first iteration
        run.turn(2)
    while len(found[runs[0].name]) < FEWEST or (spent < seconds and most > len(found[FUSED])):
        for run in shuffled.sample(runs, len(runs)):
            warm = run.turn(1)  # brings this variant's model back into the caches
            times = torch.tensor([run.turn(iterations), warm], dtype=torch.float64)
            dist.all_reduce(times, dist.ReduceOp.MAX)
            found[run.name].append(1e3 * times[0].item() / iterations)
            spent += times.sum().item()
        gc.collect()
    return found


def have_bits_of_stock(runs: list[Run]) -> bool:
    """All have trained the same number of iterations."""
    trained = {run.name: [p.detach() for p in run.model.parameters()] for run in runs}
    whole = {n: [getattr(p, "_local_tensor", p) for p in all_] for n, all_ in trained.items()}
    return all(equal_bits(whole[name], whole[FUSED]) for name in FUSIONS if name in whole)


def train(link: Link | None, cell: Cell, options: dict[str, Any]) -> dict[str, Any]:
    names = DDP_VARIANTS if link else FSDP_VARIANTS
    runs = [Run(name, cell, options["optimizer"], link) for name in names]
    rounds = measure(runs, cell.iterations, options["seconds"], options["rounds"])
    parameters = sum(p.numel() for p in runs[0].model.parameters())
    found = {"rounds_ms": rounds, "equal_bits": have_bits_of_stock(runs)}
    return {**found, "parameters": parameters, "buckets": link.buckets if link else []}


def work(rank: int, folder: str, way: str, cell: dict[str, Any], options: dict[str, Any]) -> None:
    sys.setswitchinterval(1e-4)  # the link's threads must not wait for the GIL, as no network does
    join(rank, folder)
    link = Link(Network(**options["network"])) if way == "DDP" else None
    found = train(link, Cell(**cell), options)
    dist.barrier()
    if link:
        link.close()
    leave(rank, found)


# Both ranks together


@dataclass(frozen=True)
class Line:
    """One variant in one cell."""

    name: str
    ms: Interval
    against_fused: Interval  # fused=True's time by this one's, round by round
    cost_ms: Interval | None  # what an iteration takes above one without an optimizer
    recovered: Interval | None  # the share of fused=True's cost that this one saves


@dataclass(frozen=True)
class Measured:
    cell: str
    way: str  # DDP or FSDP2
    rounds: int
    parameters: int
    buckets: int
    last_bucket: float | None  # its share of the parameters
    on_the_link_ms: float | None  # all messages of an iteration
    exposed: Interval | None  # the share of an iteration without optimizer
    equal_bits: bool
    lines: list[Line]

    def is_behind(self) -> bool:
        return self.exposed is not None and self.exposed.median >= BEHIND


def figures(cell: Cell, way: str, network: Network, found: dict[str, Any]) -> Measured:
    rounds: dict[str, list[float]] = found["rounds_ms"]
    none, stock, buckets = rounds[NONE], rounds[FUSED], found["buckets"]

    def line(name: str) -> Line:
        own = rounds[name]
        ratio = [a / b for a, b in zip(stock, own, strict=True)]
        recovered = share(stock, own, none) if name in FUSIONS else None
        trains = name not in (FAST, NONE)
        cost = of_medians(lambda o, n: o - n, own, none) if trains else None
        return Line(name, median_interval(own), median_interval(ratio), cost, recovered)

    exposed = of_medians(lambda n, f: (n - f) / n, none, rounds[FAST]) if buckets else None
    return Measured(
        cell=str(cell),
        way=way,
        rounds=len(none),
        parameters=found["parameters"],
        buckets=len(buckets),
        last_bucket=buckets[-1] / sum(buckets) if buckets else None,
        on_the_link_ms=1e3 * sum(map(network.seconds, buckets)) if buckets else None,
        exposed=exposed,
        equal_bits=found["equal_bits"],
        lines=[line(name) for name in rounds],
    )


def table(one: Measured) -> str:
    rows = [("", "ms an iteration", "x fused", "above no optimizer", "recovered")]
    for line in one.lines:
        cost = (line.cost_ms or "", line.recovered or "")
        rows.append((line.name, *map(str, (line.ms, line.against_fused, *cost))))
    return columns(rows)


def described(one: Measured) -> str:
    said = f"{one.way}, {one.cell}: {one.rounds} rounds"
    if one.last_bucket is not None:
        said += f", {one.buckets} buckets, the last has {one.last_bucket:.3f} of the parameters"
        said += f"; {one.on_the_link_ms:.0f} ms on the link, exposed {one.exposed} of an iteration"
    return said if one.equal_bits else f"{said}; BITS DIFFER from {FUSED}'s"


def verdict(found: list[Measured], name: str) -> str:
    """The sentence on how much hides of the part of fused=True's cost that can: all but the last
    bucket's."""
    behind = [one for one in found if one.is_behind()]
    parts = [
        line.recovered.median / (1.0 - one.last_bucket)
        for one in behind
        for line in one.lines
        if line.name == name and line.recovered and one.last_bucket is not None
    ]
    text = f"{name}: behind a network ({len(behind)} of {len(found)} cells)"
    if not parts:
        return f"{text}, {FUSED} costs nothing that can be told"
    text += f" recovers {median(parts):.2f} of what {FUSED} costs but for the last bucket"
    return f"{text} (median of {len(parts)} cells, the least {min(parts):.2f}; goal {GOAL})"


def chosen_cells(chosen: Any) -> list[Cell]:
    cells = (SMOKE,) if chosen.smoke else QUICK_CELLS if chosen.quick else CELLS
    return [cell for cell in cells if cell.model in (chosen.model or MODELS)]


def section(chosen: Any) -> dict[str, Any]:
    network = Network(LATENCY_MS, ms_per_mb=8 / chosen.gbit)
    options = {"optimizer": chosen.optimizer, "seconds": chosen.seconds}
    options |= {"rounds": chosen.rounds or MOST, "network": asdict(network)}
    ways = ("DDP", "FSDP2") if chosen.fsdp else ("DDP",)
    found: list[Measured] = []
    for way in ways:
        for cell in in_time(chosen_cells(chosen), chosen):
            progress(f"{way}, {cell}")
            both = pair(__file__, f"{way}, {cell}", way, asdict(cell), options)
            found.append(figures(cell, way, network, both))
            title(described(found[-1]))
            print(table(found[-1]), flush=True)
    ddp = [one for one in found if one.way == "DDP"]
    said = [verdict(ddp, name) for name in FUSIONS]
    title("\n".join(said))
    made_with = {"processes": WORLD, "threads_of_each": 1, "network": network}
    return {**made_with, "bucket_cap_mb": BUCKET_MB, "verdict": said, "cells": found}


if __name__ == "__main__":
    work(*given())
