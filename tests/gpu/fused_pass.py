# SPDX-License-Identifier: BSD-3-Clause
"""The fused back pass of a bfloat16 model: that Backward(final=True) has the bits of the hooks that
trainers write, the most memory that either takes, and milliseconds of an update on the GPU beside
torch.optim.AdamW(fused=True), which rounds to nearest.

    fused_pass.py --device cuda"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import torch
from common import differing
from torch import Tensor, nn
from trainers import ByScale

import optfuse
from optfuse.optim import AdamW

Make = Callable[[Any], Any]
ROUNDED: dict[str, Make] = {
    "AdamW, rounded": functools.partial(AdamW, stochastic_rounding=True),
    "AdamW, state, too": functools.partial(AdamW, stochastic_rounding=True, stochastic_state=True),
}
STOCK: Make = functools.partial(torch.optim.AdamW, fused=True)
CLASSES = {**ROUNDED, "Adafactor": torch.optim.Adafactor, "with its scale": ByScale}
LAYERS, SIZE, ROWS, PASSES = 24, 1024, 256, 3
WARM_UP, ROUNDS = 3, 9
AHEAD = 20_000_000  # cycles for which the GPU waits: in them the host launches all


def model_on(device: torch.device, size: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(size, size, device="cpu") for _ in range(LAYERS))
    return nn.Sequential(*(layer.to(device, torch.bfloat16) for layer in layers))


def by_hooks(optimizer: Any) -> Any:
    def hook(p: Tensor) -> None:
        optimizer.step()
        p.grad = None

    for group in optimizer.param_groups:
        for p in group["params"]:
            p.register_post_accumulate_grad_hook(hook)
    return optimizer


def final(optimizer: Any) -> Any:
    return optfuse.fuse(optimizer, optfuse.Backward(final=True))


def tensors_of(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for p in group["params"]:
            yield p.detach().cpu()
            yield from (t.cpu() for t in optimizer.state[p].values() if isinstance(t, Tensor))


def trained(make: Make, wrap: Make, device: torch.device, size: int) -> tuple[list[Tensor], float]:
    """All tensors after some passes, and the most MB that the model took with all of its own."""
    gc.collect()
    is_real = device.type == "cuda"
    before = torch.cuda.memory_allocated() if is_real else 0
    if is_real:
        torch.cuda.reset_peak_memory_stats()
    model = model_on(device, size)
    optimizer = wrap(make(model.parameters()))
    for seed in range(PASSES):
        torch.manual_seed(seed)
        x = torch.randn(ROWS, size, device="cpu").to(device, torch.bfloat16)
        model(x).float().square().mean().backward()
    peak = torch.cuda.max_memory_allocated() - before if is_real else 0
    return list(tensors_of(optimizer)), peak / 1e6


def update_of(optimizer: Any, device: torch.device) -> float:
    """Milliseconds of its step(), on a GPU without the host's part."""
    if device.type != "cuda":
        began = time.perf_counter()
        optimizer.step()
        optfuse.flush()
        return (time.perf_counter() - began) * 1000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD)
    start.record()
    optimizer.step()
    optfuse.flush()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def optimizers(device: torch.device, size: int) -> Iterator[tuple[str, Any]]:
    """With gradients; fused where they are ours."""
    for name, make in {"AdamW(fused=True)": STOCK, **ROUNDED}.items():
        params = list(model_on(device, size).parameters())
        for p in params:
            p.grad = torch.full_like(p, 0.01)
        yield name, make(params) if make is STOCK else optfuse.fuse(make(params))


def rows(device: torch.device, size: int = SIZE) -> Iterator[str]:
    """Raises AssertionError for other bits than those of hooks."""
    yield f"{'MB at most':20} {'hooks':>9} {'final':>9}"
    for name, make in CLASSES.items():
        (wanted, most), (found, ours) = (trained(make, w, device, size) for w in (by_hooks, final))
        pairs = zip(found, wanted, strict=True)
        assert not any(differing(a, b).any() for a, b in pairs), f"{name}: not the bits of hooks"
        yield f"{name:20} {most:9.1f} {ours:9.1f}"
    yield f"{'ms of an update':20} {LAYERS} x {size} x {size} bfloat16"
    steppers = dict(optimizers(device, size))
    times = {name: [update_of(one, device) for _ in range(WARM_UP + ROUNDS)]
             for name, one in steppers.items()}  # fmt: skip
    for name, taken in times.items():
        yield f"{name:20} {median(taken[WARM_UP:]):9.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    chosen = parser.parse_args()
    for row in rows(torch.device(chosen.device), SIZE if chosen.device == "cuda" else 32):
        print(row, flush=True)


if __name__ == "__main__":
    main()
