# SPDX-License-Identifier: BSD-3-Clause
"""The host's work for a GPU, counted without one: on the GPU that the tests play
(tests/device), whose own work, kernels and PyTorch operators, is left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import callgrind
import torch
from callgrind import Counts, Function
from console import columns, title

RELEASE = ".".join(torch.__version__.split(".")[:2])
NEEDED = {
    "OPTFUSE_LIBRARY": f"shim/liboptfuse_torch-{RELEASE}-*-guards.so",
    "OPTFUSE_FAKE_CUDA": "tests/device/libfake_cuda.so",
    "OPTFUSE_CUDA_LIBRARY": "tests/device/libfake_optfuse_cuda.so",
}
# What runs on a GPU, or only in this build: the played device, a launch as its driver has
# it (and what that tells the device), and the test-only switches of guards.
LEFT_OUT = ("host_launch", "tell", "of_guard_enabled")
PLAYED = Path(NEEDED["OPTFUSE_FAKE_CUDA"]).name
LAUNCHES, RECORDS, WAITS = "host_launch", "GuardImpl::record", "GuardImpl::block"
SIZES = {1: "each alone", 1 << 20: "1 MiB", 4 << 20: "4 MiB, default", 16 << 20: "16 MiB"}
SIZES[1 << 40] = "all together"
STOCK = "fused=True"
WAYS = ("forward fusion", "backward fusion", "side stream")
PHASES = ("backward", "step", "use", "use again")


@dataclass(frozen=True)
class HostWork:
    """Instructions a parameter above those without an optimizer, by phase; and what one
    iteration sends to the device, of all parameters together."""

    way: str
    instructions: dict[str, float]
    launches: int
    events: int
    waits: int

    def cells(self) -> tuple[str, ...]:
        counted = [f"{self.instructions[phase]:,.0f}" for phase in PHASES]
        total = f"{sum(self.instructions.values()):,.0f}"
        return (self.way, *counted, total, str(self.launches), str(self.events), str(self.waits))


def missing(build: Path) -> str:
    """What was not built, or nothing."""
    absent = [pattern for pattern in NEEDED.values() if not list(build.glob(pattern))]
    return f"{absent[0]} is not there: tests/run builds it where nvcc is found" if absent else ""


def environment(build: Path) -> dict[str, str]:
    paths = {name: str(next(build.glob(pattern))) for name, pattern in NEEDED.items()}
    return {**os.environ, **paths}


def is_left_out(function: Function) -> bool:
    return function[0] == PLAYED or function[1] in LEFT_OUT


def host_work(found: dict[str, Counts], n: int) -> list[HostWork]:
    """Without an optimizer backward and uses are those of fused=True, which may be run
    late or in passing by the others only."""

    def instructions(way: str, phase: str) -> float:
        counted = found[f"{phase}, {way}"].without(is_left_out)
        bare = 0 if phase == "step" else found[f"{phase}, {STOCK}"].without(is_left_out)
        return (counted - bare) / n

    def calls(way: str, name: str) -> int:
        return sum(found[f"{phase}, {way}"].calls_of(name) for phase in PHASES)

    return [
        HostWork(
            way,
            {phase: instructions(way, phase) for phase in PHASES},
            *(calls(way, name) - calls(STOCK, name) for name in (LAUNCHES, RECORDS, WAITS)),
        )
        for way in (STOCK, *WAYS)
    ]


def launches(program: Path, played: dict[str, str]) -> list[dict[str, Any]]:
    title("Kernels launched an iteration, AdamW float32, by bucket_bytes")
    command = [sys.executable, str(program), "launches"]
    done = subprocess.run(command, capture_output=True, text=True, env=played)
    if done.returncode != 0:
        raise RuntimeError(f"{program.name} failed:\n{done.stdout}{done.stderr}")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    names = [SIZES.get(int(n), n) for n in found[0]["launches"]]
    rows = [("", *names)]
    rows += [
        (f"{one['model']}, {one['mode']}", *map(str, one["launches"].values())) for one in found
    ]
    print(columns(rows))
    return found


def section(folder: Path, n: int) -> dict[str, Any] | None:
    title(f"Host instructions for one parameter of one element, of {n:,}, on a played GPU")
    build = Path(os.environ.get("OPTFUSE_BUILD", ""))
    why = missing(build)
    if why:
        print(f"not counted: {why}")
        return None
    program = Path(__file__).with_name("counted_gpu.py")
    played = environment(build)
    counts = callgrind.run(program, ["instructions", str(n)], folder, played)
    every = host_work(counts, n)
    rows = [("", *PHASES, "in all", "launches", "events", "waits")]
    print(columns([*rows, *(one.cells() for one in every)]))
    models = launches(program, played)
    return {"parameters": n, "host_work": [asdict(one) for one in every], "launches": models}
