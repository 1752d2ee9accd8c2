# SPDX-License-Identifier: BSD-3-Clause
"""Section memory: the most bytes of tensors alive at once, from the events of PyTorch's
allocator; and on the CPU what the whole process had resident at most, each variant in a process
of its own (this file, run with a cell, an optimizer and a variant)."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
from cells import Cell, batches, cells_of, training
from compare import in_time
from figures import FUSED, columns, progress, title
from torch.profiler import ProfilerActivity, profile
from variants import variants

import optfuse
from optfuse_tools.ab.variants import BuildFn, Iteration, Wrap

WARMUP, MEASURED, RESIDENT = 2, 3, 10  # iterations
SMOKE = (FUSED, "backward fusion")  # a process each


def peak_on_gpu(build: BuildFn, wrap: Wrap) -> float:
    """MB of tensors; memory that was there before the model does not count."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    iteration = build(wrap)
    iterate(iteration, WARMUP)
    torch.cuda.reset_peak_memory_stats()
    iterate(iteration, MEASURED)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def peak_on_cpu(build: BuildFn, wrap: Wrap) -> float:
    """MB of tensors. The profiler runs from before the model exists, so that parameters and
    state count."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it reports each start and stop
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        iterate(build(wrap), WARMUP + MEASURED)
    events = profiler.profiler.kineto_results.events()
    sizes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return max(accumulate(size for _, size in sorted(sizes))) / 1e6


def iterate(iteration: Iteration, n: int) -> None:
    for _ in range(n):
        iteration()
    optfuse.flush()


def alone(model: str, batch: str, optimizer: str, variant: str) -> dict[str, float]:
    """The memory that this process uses for one variant; page faults are those of an iteration."""
    build, wrap = training(Cell(model, int(batch), 1), optimizer), variants()[variant]
    iteration = build(wrap)
    iterate(iteration, WARMUP)
    before = getrusage(RUSAGE_SELF).ru_minflt
    iterate(iteration, RESIDENT)
    faults = (getrusage(RUSAGE_SELF).ru_minflt - before) / RESIDENT
    high = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text("utf-8"))
    found = {"process_mb": int(high[1]) * 1024 / 1e6 if high else None, "faults": faults}
    return {"tensors_mb": peak_on_cpu(build, wrap), **found}


def measure(chosen: Any, cell: Cell, variant: str) -> dict[str, float]:
    if cell.device == "cuda":
        build = training(cell, chosen.optimizer)
        return {"tensors_mb": peak_on_gpu(build, variants(cell.device)[variant])}
    command = [sys.executable, __file__, str(chosen.packages), str(torch.get_num_threads())]
    command += [cell.model, str(cell.batch), chosen.optimizer, variant]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"memory of {cell} with {variant} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def section(chosen: Any) -> dict[str, Any]:
    title(f"Peak memory, MB, and against {FUSED}")
    peaks: dict[str, dict[str, dict[str, float]]] = {}
    for cell in in_time(cells_of(chosen, quick=True), chosen):
        if cell.device == "cuda":  # what is allocated once is allocated before
            next(batches(cell))
            measure(chosen, cell, FUSED)
        here = peaks[str(cell)] = {}
        for name in SMOKE if chosen.smoke else variants(cell.device):
            progress(f"memory: {cell}, {name}")
            here[name] = measure(chosen, cell, name)
        rows = [(str(cell), "tensors", "", "whole process", "", "faults an iteration")]
        for name, one in here.items():
            row = [name]
            for key in ("tensors_mb", "process_mb"):
                pair = (f"{one[key]:.1f}", f"{one[key] - here[FUSED][key]:+.1f}")
                row += pair if key in one else ("", "")
            rows.append((*row, f"{one['faults']:.0f}" if "faults" in one else ""))
        progress("")
        print(columns(rows), flush=True)
    return {"peak": peaks}


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    torch.set_num_threads(int(sys.argv[2]))
    print(json.dumps(alone(*sys.argv[3:])))
