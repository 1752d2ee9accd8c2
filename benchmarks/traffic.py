# SPDX-License-Identifier: BSD-3-Clause
"""How many bytes an iteration moves between the last cache and memory, by valgrind's simulation of
caches: two levels, the last one smaller than the model. It counts lines that are read and written
for the first time since they left the cache (misses of reads and of writes), and no write-back.

Run under valgrind it is the child, which trains between marks: "traffic.py KIND"."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from counted import marks
from figures import columns, title
from torch import nn
from torch.optim import AdamW, Optimizer

import optfuse

LINE, LAST_LEVEL = 64, 2 << 20  # bytes
WIDTH, LAYERS, BATCH, WARM_UP = 256, 24, 8, 3
KINDS: dict[str, Callable[[Optimizer], Optimizer]] = {
    "fused=True": lambda optimizer: optimizer,
    "backward fusion": partial(optfuse.fuse, mode="backward", products="off"),
    "forward fusion": partial(optfuse.fuse, mode="forward", products="off"),
    "backward, promises": partial(optfuse.fuse, mode="backward"),
    "forward, promises": partial(optfuse.fuse, mode="forward"),
}
STOCK = {"no optimizer": {}, "for-loop": {"foreach": False}, "foreach=True": {"foreach": True}}


def train(kind: str) -> None:
    """Counts one iteration. A layer with its gradient and state fits into the last cache, all do
    not."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer: Optimizer = AdamW(model.parameters(), **(STOCK.get(kind) or {"fused": True}))
    optimizer = KINDS.get(kind, lambda stock: stock)(optimizer)
    step = (lambda: None) if kind == "no optimizer" else optimizer.step
    x = torch.randn(BATCH, WIDTH)

    def iterate() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        step()

    for _ in range(WARM_UP):
        iterate()
    marks()(kind, iterate)


def misses(lines: list[str]) -> tuple[int, int]:
    """Lines that were read and written past the last cache, of a file of callgrind's."""
    names = next(line for line in lines if line.startswith("events:")).split()[1:]
    totals = next(line for line in lines if line.startswith("totals:")).split()[1:]
    found = dict(zip(names, map(int, totals), strict=True))
    return found["DLmr"], found["DLmw"]


def bytes_of(kind: str, folder: Path, environment: Mapping[str, str]) -> dict[str, float]:
    """MB that one iteration reads and writes."""
    for old in folder.glob("traffic.out*"):
        old.unlink()
    command = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", "--cache-sim=yes"]
    command += [f"--LL={LAST_LEVEL},16,{LINE}", f"--callgrind-out-file={folder / 'traffic.out'}"]
    command += [sys.executable, str(Path(__file__)), kind]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(environment))
    if done.returncode != 0:
        raise RuntimeError(f"traffic.py failed under valgrind:\n{done.stdout}{done.stderr}")
    texts = [path.read_text("utf-8") for path in folder.glob("traffic.out*")]
    (text,) = (t for t in texts if re.search(f"Client Request: {re.escape(kind)}$", t, re.M))
    read, written = misses(text.splitlines())
    return {"read_mb": read * LINE / 1e6, "written_mb": written * LINE / 1e6}


def count(chosen: Any) -> dict[str, Any]:
    weights = LAYERS * WIDTH * WIDTH * 4
    title(
        f"Memory traffic of an iteration, simulated: {LAYERS} x Linear({WIDTH}), batch {BATCH}, "
        f"{weights / 1e6:.1f} MB of weights, a last cache of {LAST_LEVEL >> 20} MiB"
    )
    build = Path(os.environ.get("OPTFUSE_BUILD", "")) / "benchmarks" / "libcallgrind_marks.so"
    if shutil.which("valgrind") is None or not build.is_file():
        print("not counted: valgrind is missing, or its headers were when optfuse was built")
        return {}
    # Whether panels pay is tried by the clock, which runs otherwise under valgrind.
    environment = {**os.environ, "OPTFUSE_PRODUCTS": "force"}
    kinds = ["no optimizer", "fused=True"] if chosen.smoke else [*STOCK, *KINDS]
    found = {kind: bytes_of(kind, chosen.out, environment) for kind in kinds}
    rows = [("", "MB read", "MB written", "in all, of the weights' bytes")]
    for kind, mb in found.items():
        of_weights = sum(mb.values()) * 1e6 / weights
        rows.append((kind, *(f"{n:.1f}" for n in mb.values()), f"{of_weights:.1f}"))
    print(columns(rows))
    for left in chosen.out.glob("traffic.out*"):
        left.unlink()
    return {"weights_mb": weights / 1e6, "last_cache_mib": LAST_LEVEL >> 20, "kinds": found}


if __name__ == "__main__":
    train(sys.argv[1])
