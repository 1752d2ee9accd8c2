# SPDX-License-Identifier: BSD-3-Clause
"""Classes without kernels: milliseconds of a step() by the class itself and recorded, host and GPU
together, one after the other in each round, and of a recorded one on the GPU alone; and that both
have the same bits after it.

    recorded_times.py --device cuda"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import torch
from common import differing
from style_classes import AdaBelief, Foreach, SignOfAverage, TensorCounter
from torch import Tensor

import optfuse
from optfuse._fused.recorded import last_counts

CLASSES: tuple[Any, ...] = (AdaBelief, SignOfAverage, Foreach, TensorCounter)
Case = tuple[int, int, torch.dtype]  # parameters, elements of each
CASES: tuple[Case, ...] = (
    (160, 22_000, torch.float32),
    (1_000, 1_000, torch.float32),
    (1, 1 << 24, torch.float32),
    (1, 1 << 24, torch.bfloat16),
)
TINY: tuple[Case, ...] = ((3, 50, torch.float32), (1, 1_000, torch.bfloat16))  # for a CPU
WARM_UP, ROUNDS = 5, 12
AHEAD = 20_000_000  # cycles for which the GPU waits: in them the host launches all


def params_of(case: Case, device: torch.device) -> list[torch.nn.Parameter]:
    count, n, dtype = case
    random = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        value, grad = (torch.randn(n, generator=random).to(device, dtype) for _ in range(2))
        made.append(torch.nn.Parameter(value))
        made[-1].grad = grad
    return made


def milliseconds(run: Callable[[], object], api: Any) -> float:
    api.synchronize()
    began = time.perf_counter()
    run()
    api.synchronize()
    return (time.perf_counter() - began) * 1000


def on_the_gpu(optimizer: Any) -> float:
    """Milliseconds of its step() on the GPU, without the host's part."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD)
    start.record()
    optimizer.step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def tensors_of(optimizer: Any) -> Iterator[Tensor]:
    for p in optimizer.param_groups[0]["params"]:
        yield p
        yield from (value for value in optimizer.state[p].values() if isinstance(value, Tensor))


def measured(cls: Any, case: Case, device: torch.device) -> str:
    count, n, dtype = case
    name = f"{count:,} x {n:,} {str(dtype).removeprefix('torch.')}"
    api = torch.get_device_module(device)
    own, ours = (cls(params_of(case, device)) for _ in range(2))
    optfuse.fuse(ours)
    alone: list[float] = []
    times: list[tuple[float, float]] = []
    for _ in range(WARM_UP + ROUNDS):
        times.append((milliseconds(own.step, api), milliseconds(ours.step, api)))
        assert last_counts()["lines"], f"{cls.__name__} was not recorded"
        if device.type == "cuda":
            alone.append(on_the_gpu(ours))
            own.step()
    pairs = zip(tensors_of(ours), tensors_of(own), strict=True)
    assert not any(differing(a, b).any() for a, b in pairs), f"{cls.__name__}: not stock's bits"
    columns = [*zip(*times[WARM_UP:], strict=True), *([alone[WARM_UP:]] if alone else [])]
    return f"{name:24} {cls.__name__:14}" + "".join(f" {median(one):9.3f}" for one in columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    chosen = parser.parse_args()
    head = "".join(f" {name:>9}" for name in ("own", "recorded", "GPU alone"))
    print(f"{'ms':39}{head}", flush=True)
    for case in CASES if chosen.device == "cuda" else TINY:
        for cls in CLASSES:
            print(measured(cls, case, torch.device(chosen.device)), flush=True)


if __name__ == "__main__":
    main()
