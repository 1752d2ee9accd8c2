# SPDX-License-Identifier: BSD-3-Clause
"""Peak memory of training, from the events of PyTorch's allocator."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import optfuse
from optfuse._ab.variants import BuildFn, Wrap

WARMUP, MEASURED = 2, 3
MARK = "optfuse benchmark: measured iterations"


def peak_bytes(build_fn: BuildFn, wrap: Wrap, device: str = "cpu") -> int:
    """The most bytes of tensors alive at once during the measured iterations;
    memory that was there before the model does not count."""
    return _peak_on_gpu(build_fn, wrap) if device == "cuda" else _peak_on_cpu(build_fn, wrap)


def _peak_on_gpu(build_fn: BuildFn, wrap: Wrap) -> int:
    gc.collect()
    torch.manual_seed(0)
    before = torch.cuda.memory_allocated()
    iteration = build_fn(wrap)
    for _ in range(WARMUP):
        iteration()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(MEASURED):
        iteration()
    optfuse.flush()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _peak_on_cpu(build_fn: BuildFn, wrap: Wrap) -> int:
    """The most bytes of tensors alive at once during the measured iterations.

    The profiler runs from before the model exists, so that parameters and
    optimizer state count.
    """
    gc.collect()
    torch.manual_seed(0)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it reports each start and stop
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        iteration = build_fn(wrap)
        for _ in range(WARMUP):
            iteration()
        with record_function(MARK):
            for _ in range(MEASURED):
                iteration()
            optfuse.flush()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return _peak(events)


def _peak(events: list[dict[str, Any]]) -> int:
    mark = next(event for event in events if event.get("name") == MARK)
    begin, end = mark["ts"], mark["ts"] + mark["dur"]
    alive: dict[int, int] = {}
    total = peak = 0
    allocations = [event for event in events if event.get("name") == "[memory]"]
    for event in sorted(allocations, key=lambda event: event["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        total -= alive.pop(address, 0)
        if size > 0:
            alive[address] = size
            total += size
        if begin <= event["ts"] <= end:
            peak = max(peak, total)
    return peak
