# SPDX-License-Identifier: BSD-3-Clause
"""A weight's gradient dY' X made whole and then updated, beside panels of its rows with the
update behind each, in one buffer that the L2 cache holds: whether cuBLAS gives both the same
bits, and the GPU's time of both as CUDA graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

import optfuse

SHAPES = ((4096, 4096), (8192, 2048), (3072, 768), (1000, 2048))
ROWS = (1, 8, 64, 256, 1024, 4096)
PANELS = (2, 4, 8, 16)  # MiB of gradient
DTYPES = (torch.float32, torch.bfloat16)
TIMED = ((4096, 4096), (8192, 2048))
ROUNDS = 15


def heights(n: int, k: int, dtype: torch.dtype, mebibytes: int) -> list[int]:
    """Rows of W in each panel."""
    most = max(1, (mebibytes << 20) // (k * dtype.itemsize))
    return [min(most, n - at) for at in range(0, n, most)]


def factors(rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    x, dy = torch.randn(rows, k, device="cuda"), torch.randn(rows, n, device="cuda")
    return x.to(dtype), dy.to(dtype)


def by_panels(dy: Tensor, x: Tensor, sizes: list[int]) -> list[Tensor]:
    return [part.t() @ x for part in dy.split(sizes, 1)]


def report_bits() -> None:
    for dtype in DTYPES:
        for n, k in SHAPES:
            said = []
            for rows in ROWS:
                x, dy = factors(rows, n, k, dtype)
                whole = dy.t() @ x
                equal = [
                    mebibytes
                    for mebibytes in PANELS
                    if torch.equal(
                        whole, torch.cat(by_panels(dy, x, heights(n, k, dtype, mebibytes)))
                    )
                ]
                said.append(f"{rows}: {equal}")
            print(f"equal bits, {dtype} {n} x {k}, rows: MiB a panel  {'  '.join(said)}")


def iteration(dy: Tensor, x: Tensor, weight: Tensor, sizes: list[int]) -> Callable[[], None]:
    """The product and the update of each panel of the weight, by optfuse's kernel."""
    parts = [torch.nn.Parameter(part) for part in weight.split(sizes)]
    optimizers = [
        optfuse.fuse(torch.optim.AdamW([part], fused=True, capturable=True)) for part in parts
    ]
    buffer = torch.empty(max(sizes), weight.shape[1], device="cuda", dtype=weight.dtype)
    gradients = [buffer[:size] for size in sizes]
    slices = [part.t() for part in dy.split(sizes, 1)]

    def run() -> None:
        for part, optimizer, gradient, piece in zip(
            parts, optimizers, gradients, slices, strict=True
        ):
            torch.mm(piece, x, out=gradient)
            part.grad = gradient
            optimizer.step()
            optfuse.flush()
            part.grad = None

    return run


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """The graph needs the memory of `run` as long as it is played."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1000 * begin.elapsed_time(end)


def report_times() -> None:
    for dtype in DTYPES:
        for n, k in TIMED:
            for rows in ROWS:
                x, dy = factors(rows, n, k, dtype)
                kinds = {"whole": [n]}
                kinds |= {f"{m} MiB": heights(n, k, dtype, m) for m in PANELS}
                weight = torch.randn(n, k, device="cuda", dtype=dtype)
                runs = {
                    name: iteration(dy, x, weight.clone(), sizes) for name, sizes in kinds.items()
                }
                graphs = {name: captured(run) for name, run in runs.items()}
                took: dict[str, list[float]] = {name: [] for name in graphs}
                for _ in range(3 + ROUNDS):
                    for name, graph in graphs.items():
                        took[name].append(microseconds(graph))
                medians = {name: statistics.median(t[3:]) for name, t in took.items()}
                row = "  ".join(f"{name} {us:.0f}" for name, us in medians.items())
                print(f"us, {dtype} {n} x {k}, {rows} rows: {row}", flush=True)


if __name__ == "__main__":
    report_bits()
    report_times()
