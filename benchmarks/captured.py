# SPDX-License-Identifier: BSD-3-Clause
"""Section captured: whole iterations in CUDA graphs, so that the GPU's time counts and the host's
does not; buckets of backward fusion; and the most memory, which no graph has kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from cells import MODELS, OPTIMIZERS, Cell, batches
from compare import compare, in_time
from figures import FUSED, columns, progress, title
from memory import peak_on_gpu
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

import optfuse
from optfuse_tools.ab.variants import BuildFn, Iteration, NoOptimizer, Wrap, with_flags

WARM_UP, LIMIT = 3, 1.0  # iterations before a capture; of the norm, where gradients are clipped
MIB = (4, 8, 16, 32)
MEMORY_OF = (FUSED, "forward fusion", "backward fusion", "side-stream fusion")


@dataclass(frozen=True)
class Captured(Cell):
    device: str = "cuda"
    how: str = ""

    def __str__(self) -> str:
        return f"{super().__str__()}, captured" + (f", {self.how}" if self.how else "")


# Iterations a round: some 60 ms. Of the first cell's model buckets and memory are measured, too.
CELLS = (
    Captured("GPT-2", 1, 4),
    Captured("MLP", 8, 120),
    Captured("ResNet-50", 1, 15),
    Captured("MobileNetV2", 32, 4),
    Captured("GPT-2", 8, 1),
)
HOWS = ("bfloat16", "clipped", "scaled")
MORE_CELLS = (
    Captured("ResNet-18", 1, 30),
    Captured("MLP-200x64", 8, 30),
    Captured("ViT-S", 8, 10),
    *(Captured("GPT-2", 1, 4, how=how) for how in HOWS),
)
SMOKE = Captured("MLP", 8, 2)


def stock(**flags: bool | None) -> Wrap:
    """With its step counters on the GPU, where that is an option."""

    def wrap(optimizer: Optimizer) -> Optimizer:
        counted = {"capturable": True} if "capturable" in optimizer.defaults else {}
        return with_flags(optimizer, **flags, **counted)

    return wrap


def fused(mode: Any, **how: Any) -> Wrap:
    make = stock(fused=True, foreach=None)
    return lambda optimizer: optfuse.fuse(make(optimizer), mode, **how)


def side_stream(**how: Any) -> Wrap:
    return fused(optfuse.Backward(side_stream=True), **how)


def variants(cell: Captured) -> Mapping[str, Wrap]:
    """Backward mode neither clips nor scales, and with others GradScaler asks the GPU for numbers,
    which no graph can."""
    always = {FUSED: stock(fused=True, foreach=None), "forward fusion": fused("forward")}
    if cell.how == "scaled":
        return always
    ours = {"backward fusion": fused("backward"), "side-stream fusion": side_stream()}
    return {
        "no optimizer": NoOptimizer,
        "for-loop": stock(foreach=False, fused=None),
        "foreach=True": stock(foreach=True, fused=None),
        **always,
        **(ours if cell.how != "clipped" else {}),
    }


def buckets() -> Mapping[str, Wrap]:
    found = {FUSED: stock(fused=True, foreach=None)}
    for name, make in (("backward", partial(fused, "backward")), ("side stream", side_stream)):
        found |= {f"{name}, {n} MiB": make(bucket_bytes=n << 20) for n in MIB}
    return found


def one_iteration(cell: Captured, optimizer: str, wrap: Wrap) -> Callable[[], Tensor]:
    """Its batch is the same each time, and stays where it is."""
    x, y = next(batches(cell))
    with torch.device(cell.device):
        model = MODELS[cell.model]()
    opt = wrap(OPTIMIZERS[optimizer](model.parameters()))
    kind = torch.device(cell.device).type
    scaler = torch.amp.GradScaler(kind, enabled=cell.how == "scaled")
    narrow = partial(torch.autocast, kind, torch.bfloat16)
    cast = narrow if cell.how == "bfloat16" else contextlib.nullcontext

    def iterate() -> Tensor:
        opt.zero_grad()
        with cast():
            loss = cross_entropy(model(x).flatten(0, -2), y.flatten())
        scaler.scale(loss).backward()
        if cell.how == "clipped":
            optfuse.clip_grad_norm_(model.parameters(), LIMIT)
        scaler.step(opt)
        scaler.update()
        if cell.how == "clipped":
            opt.zero_grad()  # a gradient that is gone by the end is not multiplied in memory
        return loss.detach()

    return iterate


def in_a_graph(work: Callable[[], Tensor]) -> tuple[Any, Tensor]:
    """Its graph and loss. Warmed up on a stream of its own, as PyTorch's documentation asks."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = work()
    return graph, loss


def training(cell: Captured, optimizer: str) -> BuildFn:
    def build(wrap: Wrap) -> Iteration:
        work = one_iteration(cell, optimizer, wrap)
        graph, loss = in_a_graph(work)

        def replay(_: Any = work) -> Tensor:  # a graph keeps neither model nor batch
            graph.replay()
            return loss

        return replay

    return build


def memory(cell: Captured, optimizer: str) -> dict[str, float]:
    """MB at the peak of eager iterations."""
    build, every = partial(one_iteration, cell, optimizer), variants(cell)
    found: dict[str, float] = {}
    for name in MEMORY_OF:
        progress(f"memory: {cell}, {name}")
        found[name] = peak_on_gpu(build, every[name])
    title(f"Peak memory, MB: {cell}")
    print(columns([("", "tensors"), *((name, f"{mb:.1f}") for name, mb in found.items())]))
    return found


def chosen_cells(chosen: Any) -> list[Captured]:
    every = (SMOKE,) if chosen.smoke else MORE_CELLS if chosen.more else CELLS
    return [cell for cell in every if cell.model in (chosen.model or MODELS)]


def section(chosen: Any) -> dict[str, Any] | None:
    if chosen.device != "cuda":
        print("not measured: CUDA graphs need a GPU")
        return None
    found, peaks = [], {}
    for cell in in_time(chosen_cells(chosen), chosen):
        build, few = training(cell, chosen.optimizer), (chosen.rounds or 40, chosen.seconds)
        found += compare(chosen, cell, build, variants(cell), *few)
        if cell == CELLS[0]:
            found += compare(chosen, replace(cell, how="buckets"), build, buckets(), *few)
            peaks[str(cell)] = memory(cell, chosen.optimizer)
    return {"cells": [one.to_dict() for one in found], "peak": peaks}
