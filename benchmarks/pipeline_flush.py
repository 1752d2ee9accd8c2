# SPDX-License-Identifier: BSD-3-Clause
"""Section pipeline-flush: pipelines without delays, simulated. Even stages beside the orders of
torch.distributed.pipelining, and deep models by the strategies of optfuse.pipeline.plan() over
GPipe, whose backward pass of a stage sends its message at its end."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from figures import columns, title
from pipeline_orders import (
    IN_A_V,
    LOOPED,
    TURNS,
    actions,
    process_of,
    tasks,
    with_whole_backwards,
)
from pipeline_shapes import DEEP, layers

from optfuse_layers.pipeline import planner
from optfuse_layers.pipeline.plan import (
    KINDS,
    PipelinePlan,
    Place,
    PlannedLayer,
    Simulated,
    placed,
    simulated,
)

STAGES = (2, 4, 8, 16, 32)
LATENCIES = (0.0, 0.1, 0.25, 0.5, 1.0)  # of a message, in forward passes of a stage
DEVICES = (8, 16, 32)
NETWORKS = {  # seconds a message, and a byte
    "NVLink": (5e-6, 1 / 150e9),
    "PCIe": (1e-5, 1 / 12e9),
    "10 Gbit/s": (5e-5, 8e-10),
}
MULTIPLY_ADDS_A_SECOND = 1e13
MICRO_BATCH = 8  # images or sequences
PAPER = "1.41 to 1.99 (arXiv 2110.00929, pipeline parallel training)"


# Even stages: F, dX and dW take as long as each other


def even(layers: int, stages: int) -> list[PlannedLayer]:
    """Behind a first layer that takes no time, so that all others have a dX. What a stage holds of
    a micro-batch is a byte."""
    seconds = stages / layers
    row = [PlannedLayer("0", 0.0, 0.0, 0.0, 0.0, 0, 0, 1, False, 0)]
    layer = PlannedLayer(
        "", seconds, seconds, seconds, 0.0, 2520 * stages // layers, 0, 1, False, 0
    )
    return row + [replace(layer, name=str(i + 1)) for i in range(layers)]


def on(plan: PipelinePlan, processes: list[int]) -> PipelinePlan:
    return replace(plan, places=tuple(Place(p, p, p) for p in [0, *processes]))


def ours(strategy: str, stages: int, latency: float, in_flight: int = 0) -> PipelinePlan:
    turns = TURNS if strategy == "modulo" else 1
    row = even(turns * stages, stages)
    options = {"in_flight": in_flight, "chunk": int(strategy == "modulo")}
    plan = placed(row, strategy, stages, (latency, 0.0), 2 * stages, 1, **options)
    return on(plan, [i % stages for i in range(turns * stages)])


def simulated_order(
    plan: PipelinePlan, batches: int, tasks: Sequence[tuple[int, ...]]
) -> Simulated:
    """Another order than the plan's. tasks: each a kind (its place in KINDS), a layer, a batch and
    a process; all that the plan has."""
    made = [planner.Task(*task) for task in tasks]
    return simulated(plan, batches, (planner.Task * len(made))(*made))


def whole(plan: PipelinePlan, batches: int) -> Simulated:
    """With backward passes of whole stages."""
    rows = [
        (KINDS.index(task.kind), task.layer, task.batch, process)
        for process in range(plan.processes)
        for task in plan.tasks(process, batches)
    ]
    return simulated_order(plan, batches, with_whole_backwards(rows))


def theirs(name: str, stages: int, latency: float) -> Simulated:
    micro = 2 * stages
    plan = on(
        ours("modulo", stages, latency),
        [process_of(name, i, stages) for i in range(TURNS * stages)],
    )
    return simulated_order(plan, micro, list(tasks(actions(name, stages, micro), micro)))


def of_stages(stages: int, latency: float) -> dict[str, Simulated]:
    micro = 2 * stages
    found = {
        "gpipe": whole(ours("gpipe", stages, latency), micro),
        "1f1b": whole(ours("1f1b_flush", stages, latency), micro),
    }
    found |= {name: theirs(name, stages, latency) for name in (*LOOPED, *IN_A_V)}
    for strategy in ("gpipe", "1f1b_flush"):
        found[f"optfuse {strategy}"] = ours(strategy, stages, latency).simulated(micro)
    for share in (1, 1.5, 2):
        plan = ours("fast_forward", stages, latency, int(share * stages))
        found[f"optfuse fast_forward {share:g} P"] = plan.simulated(micro)
    plan = ours("modulo", stages, latency, 2 * stages)
    found["optfuse modulo 2 P"] = plan.simulated(micro)
    return found


def line(latency: float, found: dict[str, Simulated]) -> dict[str, Any]:
    gpipe = found["gpipe"].makespan
    return {"latency": latency} | {name: gpipe / one.makespan for name, one in found.items()}


def bubbles(stages: int) -> dict[str, Any]:
    rows = [line(latency, found := of_stages(stages, latency)) for latency in LATENCIES]
    busy = 3 * 2 * stages
    free = of_stages(stages, 0.0)
    return {
        "stages": stages,
        "micro_batches": 2 * stages,
        "bubble": {name: 1 - busy / one.makespan for name, one in free.items()},
        "held": {name: one.held_bytes / 2520 for name, one in found.items()},
        "rows": rows,
    }


# Deep models


def of_model(model: str, network: tuple[float, float], devices: int) -> dict[str, Any]:
    row = layers(model, MULTIPLY_ADDS_A_SECOND, MICRO_BATCH)
    micro = 2 * devices
    chunk = -(-len(row) // (TURNS * devices))
    plans = {
        strategy: placed(row, strategy, devices, network, micro)
        for strategy in ("gpipe", "1f1b_flush")
    }
    for share in (1, 2):
        plans[f"fast_forward {share} P"] = placed(
            row, "fast_forward", devices, network, micro, in_flight=share * devices
        )
    plans["modulo 2 P"] = placed(
        row, "modulo", devices, network, micro, in_flight=2 * devices, chunk=chunk
    )
    base = whole(plans["gpipe"], micro)
    found = {name: plan.simulated(micro) for name, plan in plans.items()}
    return (
        {"devices": devices, "gpipe_s": base.makespan, "gpipe_GB": base.held_bytes / 1e9}
        | {name: base.makespan / one.makespan for name, one in found.items()}
        | {f"{name}, GB": one.held_bytes / 1e9 for name, one in found.items()}
    )


def section(chosen: Namespace) -> dict[str, Any]:
    stages = STAGES[:2] if chosen.smoke else STAGES
    even_stages = [bubbles(n) for n in stages]
    for one in even_stages:
        title(f"{one['stages']} even stages, {one['micro_batches']} micro-batches: x GPipe")
        names = list(one["bubble"])
        cells: list[tuple[str, ...]] = [("", *(f"{r['latency']} F" for r in one["rows"]), "held")]
        for name in names:
            gains = (f"{r[name]:.3f}" for r in one["rows"])
            cells.append((name, *gains, f"{one['held'][name]:.1f}"))
        print(columns(cells))
    models = []
    for model in list(DEEP)[: 1 if chosen.smoke else None]:
        for network, link in NETWORKS.items():
            rows = [of_model(model, link, n) for n in DEVICES[: 1 if chosen.smoke else None]]
            title(f"{model}, {network}: x GPipe")
            print(columns([tuple(rows[0]), *(tuple(f"{x:.3g}" for x in r.values()) for r in rows)]))
            models.append({"model": model, "network": network, "rows": rows})
    print(f"the paper: {PAPER}")
    return {"paper": PAPER, "even_stages": even_stages, "models": models}
