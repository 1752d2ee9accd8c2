# SPDX-License-Identifier: BSD-3-Clause
"""Traces a few iterations with torch.profiler and says in which phase of
training the updates were launched: in backward and forward, not in step().

    trace_updates.py --device cuda --out trace.json.gz

On the CPU an update of ours has no range of its own, so that there only stock's
is looked for. Exit status 1 if an update is not where it should be."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import harness  # noqa: F401 - finds the modules of tests/python
import torch
from harness import common
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import optfuse

WIDTH, LAYERS, WARMUP, STEPS = 256, 6, 3, 4
PHASES = ("zero_grad", "forward", "backward", "step")
RANGE, KERNEL, STOCK = "optfuse::", "of_", "aten::_fused_adamw_"
#: Where the updates of each run belong. In forward mode the last iteration's
#: are launched by the flush at the end, outside of every phase.
WHERE = {"stock": {"step"}, "backward": {"backward"}, "forward": {"forward", "outside"}}
Event = dict[str, Any]


def train(run: str, device: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to(device)
    optimizer = common.adamw(model.parameters())
    if run != "stock":
        optimizer = optfuse.fuse(optimizer, mode=run)
    x = torch.randn(32, WIDTH, device=device)
    for i in range(WARMUP + STEPS):
        measured = i >= WARMUP
        iterate(model, optimizer, x, f"{run}: " if measured else "warm-up: ")
    optfuse.flush()
    torch.get_device_module(device).synchronize()


def iterate(model: nn.Module, optimizer: Any, x: torch.Tensor, label: str) -> None:
    with record_function(label + "zero_grad"):
        optimizer.zero_grad()
    with record_function(label + "forward"):
        loss = model(x).square().mean()
    with record_function(label + "backward"):
        loss.backward()
    with record_function(label + "step"):
        optimizer.step()


def traced(device: str) -> list[Event]:
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    train("stock", device)  # what is done once is done before
    with profile(activities=activities) as profiler:
        for run in WHERE:
            with record_function(f"run: {run}"):
                train(run, device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return list(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def spans(events: list[Event], prefix: str) -> list[tuple[float, float, str]]:
    """Begin, end and rest of the name of the host's ranges that begin so."""
    return [
        (e["ts"], e["ts"] + e["dur"], e["name"][len(prefix) :])
        for e in events
        if e.get("ph") == "X" and e.get("cat") == "user_annotation" and e["name"].startswith(prefix)
    ]


def phase_at(moment: float, phases: list[tuple[float, float, str]]) -> str:
    return next((name for begin, end, name in phases if begin <= moment <= end), "outside")


def launched_at(events: list[Event]) -> list[tuple[float, str]]:
    """When the host launched each of our kernels, and the kernel's name."""
    calls = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_driver", "cuda_runtime") and "correlation" in e.get("args", {})
    }
    kernels = [e for e in events if e.get("cat") == "kernel" and e["name"].startswith(KERNEL)]
    return [(calls.get(e["args"].get("correlation"), -1.0), e["name"]) for e in kernels]


def summarize(events: list[Event]) -> dict[str, dict[str, dict[str, int]]]:
    """run -> what -> phase -> how many began in it."""
    hosts = [
        e for e in events if e.get("ph") == "X" and e.get("cat") in ("cpu_op", "user_annotation")
    ]
    found: dict[str, dict[str, dict[str, int]]] = {}
    for _, end, run in spans(events, "run: "):
        phases = spans(events, f"{run}: ")
        first = min((b for b, _, _ in phases), default=end)
        inside = [e for e in hosts if first <= e["ts"] <= end]
        moments = {
            "stock's update": [e["ts"] for e in inside if e["name"] == STOCK],
            "our ranges": [e["ts"] for e in inside if e["name"].startswith(RANGE)],
            "our kernels": [t for t, _ in launched_at(events) if first <= t <= end],
        }
        found[run] = {
            what: dict(Counter(phase_at(t, phases) for t in times))
            for what, times in moments.items()
            if times
        }
    return found


def problems(found: dict[str, dict[str, dict[str, int]]], device: str) -> list[str]:
    wrong = []
    for run, allowed in WHERE.items():
        wanted = ["stock's update"] if run == "stock" else ["our ranges", "our kernels"]
        for what in wanted if device == "cuda" or run == "stock" else []:
            where = found.get(run, {}).get(what, {})
            if not where.get(min(allowed)):
                wrong.append(f"{run}: {what} were not seen in {min(allowed)}")
            if set(where) - allowed:
                wrong.append(f"{run}: {what} also in {sorted(set(where) - allowed)}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=harness.BOTH, default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it reports each start and stop
    events = traced(chosen.device)
    with gzip.open(chosen.out, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": events}, file)
    found = summarize(events)
    if chosen.json:
        chosen.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    for run, what in found.items():
        for kind, where in what.items():
            print(f"{run}: {kind}: {', '.join(f'{n} in {p}' for p, n in where.items())}")
    wrong = problems(found, chosen.device)
    print("\n".join(wrong) or "updates are where they belong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
