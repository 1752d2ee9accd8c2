# SPDX-License-Identifier: BSD-3-Clause
"""Section pipeline-plan: what the strategies of optfuse.pipeline.plan() gain over PipeDream's 1F1B
without replicas, simulated for 2 to 9 processes, beside what LayerPipe's paper (arXiv 2108.06629)
says: 25 % on average, and 80 % with 7 to 9 processes; and beside what any schedule, and the best
placement of LayerPipe's kind, could gain."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, dataclass
from typing import Any

from figures import columns, title
from pipeline_bound import best_placement, least
from pipeline_shapes import MODELS, layers

from optfuse_layers.pipeline.plan import PipelinePlan, placed

PROCESSES = range(2, 10)
MANY = (7, 8, 9)
PAPER = {"mean": 1.25, "mean of 7 to 9": 1.8}
ROUNDS = 30  # batches, for each process: the period is that of the middle third
STRATEGIES = ("intra", "layerpipe", "pipedream_replicated")
BOUNDS = ("best placement", "any schedule")
COLUMNS = (*STRATEGIES, *BOUNDS)


@dataclass(frozen=True)
class Setting:
    name: str
    batch: int
    multiply_adds_a_second: float
    network: tuple[float, float]  # seconds a message, and a byte


SETTINGS = (
    Setting("messages cost nothing", 1, 1e12, (0.0, 0.0)),  # as in the paper: in clock cycles
    Setting("32 images or sequences, 100 Gbit/s", 32, 1e13, (1e-5, 8e-11)),
)


def planned(model: str, setting: Setting, strategy: str, processes: int) -> PipelinePlan:
    row = layers(model, setting.multiply_adds_a_second, setting.batch)
    return placed(row, strategy, processes, setting.network)


def simulated(model: str, setting: Setting, strategy: str, processes: int) -> tuple[float, float]:
    """Seconds and bytes a batch."""
    plan = planned(model, setting, strategy, processes)
    found = plan.simulated(ROUNDS * processes)
    return found.period, found.bytes


def lines(model: str, setting: Setting) -> list[dict[str, Any]]:
    found = []
    row = layers(model, setting.multiply_adds_a_second, setting.batch)
    for processes in PROCESSES:
        period, moved = simulated(model, setting, "1f1b", processes)
        line: dict[str, Any] = {"processes": processes, "1f1b_s": period, "1f1b_bytes": moved}
        for strategy in STRATEGIES:
            seconds, moved = simulated(model, setting, strategy, processes)
            line |= {strategy: period / seconds, f"{strategy}_bytes": moved}
        for bound, of in zip(BOUNDS, (best_placement, least), strict=True):
            line[bound] = period / of(row, processes)
        found.append(line)
    return found


def means(rows: list[dict[str, Any]], strategy: str) -> dict[str, float]:
    gains = {row["processes"]: row[strategy] for row in rows}
    return {
        "mean": sum(gains.values()) / len(gains),
        "mean of 7 to 9": sum(gains[p] for p in MANY) / len(MANY),
        "largest": max(gains.values()),
    }


def totals(model: str) -> dict[str, int]:
    shapes = list(MODELS[model]())
    return {
        "layers": len(shapes),
        "multiply_adds": sum(shape.multiply_adds for shape in shapes),
        "parameters": sum(shape.parameters for shape in shapes),
    }


def table(rows: list[dict[str, Any]]) -> str:
    head = ("processes", "1f1b, ms", *(f"{x}, x" for x in COLUMNS), "MB 1f1b", "layerpipe")
    cells = [head]
    for row in rows:
        gains = (f"{row[name]:.3f}" for name in COLUMNS)
        moved = (f"{row[f'{name}_bytes'] / 1e6:.1f}" for name in ("1f1b", "layerpipe"))
        cells.append((str(row["processes"]), f"{1e3 * row['1f1b_s']:.3f}", *gains, *moved))
    return columns(cells)


def section(chosen: Namespace) -> dict[str, Any]:
    found = []
    for setting in SETTINGS:
        for model in MODELS:
            rows = lines(model, setting)
            title(f"{model}, {setting.name}: simulated, times as fast as 1f1b")
            print(table(rows))
            gains = {name: means(rows, name) for name in COLUMNS}
            for name, of in gains.items():
                print(f"{name}: " + ", ".join(f"{what} {x:.3f}" for what, x in of.items()))
            found.append(
                {"model": model, "setting": setting.name, **totals(model), "gains": gains}
                | {"rows": rows}
            )
    print("the paper: " + ", ".join(f"{what} {x}" for what, x in PAPER.items()))
    return {"paper": PAPER, "simulated": list(map(asdict, SETTINGS)), "models": found}
