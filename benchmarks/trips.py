# SPDX-License-Identifier: BSD-3-Clause
"""Section trips: what one iteration of a network of three Linear layers enters in Python (functions
and files of optfuse) and how often it calls the library, once nothing changes any more. Counts, not
times: they are the same on every machine."""

from __future__ import annotations

import argparse
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from any_optimizer import Plain
from figures import columns, title
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import optfuse
from optfuse._library.bindings import lib, lib_with_gil

OURS = str(Path(optfuse.__file__).parent)
WARM = 5  # iterations before: state is made, buckets are rebuilt
BUCKET_MB = 0.001  # a layer each


class Trips:
    """Entered while it counts."""

    def __init__(self) -> None:
        self.functions: Counter[str] = Counter()  # entered, by file and name
        self.calls: Counter[str] = Counter()  # of the library

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code, before = frame.f_code, frame.f_back
        if code.co_filename.startswith(OURS):
            self.functions[f"{code.co_filename[len(OURS) + 1 :]}:{code.co_name}"] += 1
        elif (
            code.co_filename.endswith("torch/_ops.py")
            and code.co_name == "__call__"
            and before is not None
            and before.f_code.co_filename.startswith(OURS)
        ):
            self.calls[str(frame.f_locals["self"])] += 1

    @contextmanager
    def counting(self) -> Iterator[None]:
        libraries = lib, lib_with_gil
        stock = [(one, n, f) for one in libraries for n, f in vars(one).items() if n[:3] == "of_"]
        for one, name, function in stock:
            setattr(one, name, self._counted(name, function))
        sys.setprofile(self.see)
        try:
            yield
        finally:
            sys.setprofile(None)
            for one, name, function in stock:
                setattr(one, name, function)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls[name] += 1
            return function(*args)

        return call

    def found(self) -> dict[str, int]:
        files = {where.partition(":")[0] for where in self.functions}
        functions, calls = sum(self.functions.values()), sum(self.calls.values())
        return {"functions": functions, "files": len(files), "calls": calls}


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)
    )


def parallel(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)


def alone(cls: type[Optimizer], mode: str, **flags: Any) -> tuple[nn.Module, Optimizer]:
    model = net()
    return model, optfuse.fuse(cls(model.parameters(), **flags), mode)


def behind(kind: Callable[..., Any]) -> tuple[nn.Module, Optimizer]:
    model = parallel(net())
    return model, optfuse.fuse(AdamW(model.parameters(), fused=True), kind(ddp=model))


CASES: dict[str, Callable[[], tuple[nn.Module, Optimizer]]] = {
    "forward": functools.partial(alone, AdamW, "forward", fused=True),
    "backward": functools.partial(alone, AdamW, "backward", fused=True),
    "forward, recorded": functools.partial(alone, Plain, "forward"),
    "backward, recorded": functools.partial(alone, Plain, "backward"),
    "backward, DDP": functools.partial(behind, optfuse.Backward),
    "forward, DDP awaited": functools.partial(behind, optfuse.Forward),
}


def count(case: str) -> Trips:
    torch.manual_seed(0)
    model, optimizer = CASES[case]()
    x, trips = torch.randn(8, 16), Trips()

    def iterate() -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    for _ in range(WARM):
        iterate()
    with trips.counting():
        iterate()
    return trips


def section(chosen: argparse.Namespace) -> dict[str, Any]:
    title("what an iteration of 6 parameters enters in Python, and its calls of the library")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = {case: count(case).found() for case in CASES}
    finally:
        dist.destroy_process_group()
    rows = [("", "functions", "files", "calls")]
    rows += [(case, *map(str, counted.values())) for case, counted in found.items()]
    print(columns(rows))
    return {"trips": found}
