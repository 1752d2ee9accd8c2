# SPDX-License-Identifier: BSD-3-Clause
"""The gain of dividing layers in a pipeline of two real processes of one thread each: seconds a
batch of each strategy, in turn, and what the plan's simulation says.

Also the section pipeline-run of the benchmark; by itself: python benchmarks/pipeline_run.py"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import two_processes
from torch import Tensor, nn

import optfuse
from optfuse_tools.ab.result import median_interval

STRATEGIES = ("1f1b", "pipedream_replicated", "intra", "layerpipe")
BATCHES, ROUNDS = 24, 12  # a run; runs of each strategy


def one_heavy_layer() -> tuple[nn.Sequential, Tensor]:
    """A convolution that has more than half of all to compute."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 160, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(160, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 64, 10),
    )
    return model, torch.randn(8, 3, 16, 16)


def even() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(768, 768) for _ in range(8))), torch.randn(64, 768)


MODELS = {"one heavy layer": one_heavy_layer, "even": even}


def measure(name: str, rounds: int) -> dict[str, Any]:
    """On one rank: seconds a batch of each run, and the plans."""
    model, x = MODELS[name]()
    with torch.no_grad():
        classes = model(x).shape[1]
    target = torch.zeros(len(x), dtype=torch.long) % classes
    costs = optfuse.pipeline.plan(model, x, dist.get_world_size(), "1f1b").layers
    seconds = [(c.forward, c.input_gradient, c.weight_gradient, c.update) for c in costs]
    pipelines = {}
    for strategy in STRATEGIES:
        made = optfuse.pipeline.plan(model, x, dist.get_world_size(), strategy, costs=seconds)
        module, _ = MODELS[name]()
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
        loss_fn = nn.functional.cross_entropy
        pipelines[strategy] = optfuse.pipeline.Pipeline(made, module, loss_fn, optimizer)
    found: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    for _ in range(rounds + 1):
        for strategy, pipeline in pipelines.items():
            dist.barrier()
            began = time.perf_counter()
            pipeline.run([x] * BATCHES, [target] * BATCHES)
            found[strategy].append((time.perf_counter() - began) / BATCHES)
    return {
        strategy: {
            "seconds": found[strategy][1:],  # the first warms up
            "simulated": pipeline.plan.simulated(BATCHES).makespan / BATCHES,
            "delays": list(pipeline.plan.delays),
        }
        for strategy, pipeline in pipelines.items()
    }


def row(strategy: str, found: dict[str, Any]) -> dict[str, Any]:
    mine, base = found[strategy], found["1f1b"]
    gains = [b / m for b, m in zip(base["seconds"], mine["seconds"], strict=True)]
    gain, ms = median_interval(gains), median_interval([1e3 * s for s in mine["seconds"]])
    print(
        f"  {strategy:22}{ms} ms a batch, simulated {1e3 * mine['simulated']:.2f}; "
        f"{gain} times as fast as 1f1b; delays {mine['delays']}"
    )
    return {
        "strategy": strategy,
        "ms": ms.median,
        "simulated_ms": 1e3 * mine["simulated"],
        "gain": [gain.median, gain.low, gain.high],
        "delays": mine["delays"],
    }


def section(chosen: Any) -> dict[str, Any]:
    names = ["even"] if chosen.smoke else list(MODELS)
    rounds = 2 if chosen.smoke else ROUNDS
    models = {}
    for name in names:
        print(f"{name}:")
        found = two_processes.pair(__file__, name, name, rounds)
        models[name] = [row(strategy, found) for strategy in STRATEGIES]
    return {"batches": BATCHES, "rounds": rounds, "models": models}


def main() -> None:
    rank, folder, name, rounds = two_processes.given()
    two_processes.join(rank, folder)
    two_processes.leave(rank, measure(name, rounds))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main()
    else:

        class Full:
            smoke = False

        print(json.dumps(section(Full())))
