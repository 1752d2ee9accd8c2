# SPDX-License-Identifier: BSD-3-Clause
"""The effect of late updates on accuracy: the handwritten digits, a fifth of them held out, with
the updates of every layer late by D steps, and what they cost in one process.

Also the section delay of the benchmark; by itself: python benchmarks/delay.py"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from data import digits
from torch import Tensor, nn
from torch.nn import functional

import optfuse

DELAYS = (0, 1, 2, 4, 8, 16)
WEIGHTS = ("stash", "latest", "average")
SEEDS = (0, 1, 2, 3, 4)
BATCH, STEPS, HELD_OUT = 64, 400, 360
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], tuple[float, ...]]] = {
    "SGD": (torch.optim.SGD, (0.01, 0.03, 0.1, 0.3)),
    "AdamW": (torch.optim.AdamW, (3e-4, 1e-3, 3e-3)),
}


def conv_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def parts(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train on, and those that are held out."""
    images, labels = digits(8)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held, rest = order[:HELD_OUT], order[HELD_OUT:]
    return images[rest], labels[rest], images[held], labels[held]


def batches(images: Tensor, labels: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        for picks in torch.randperm(len(labels), generator=generator).split(BATCH):
            yield images[picks], labels[picks]


def accuracy(make: Any, rate: float, delay: int, weights: str, seed: int, steps: int) -> float:
    """Accuracy on the held-out digits, in percent, after so many steps and drain()."""
    torch.manual_seed(seed)
    model = conv_net()
    images, labels, held, right = parts(seed)
    late = optfuse.Forward(delay=optfuse.Delay({model: delay}, weights))
    opt = optfuse.fuse(make(model.parameters(), lr=rate), late)
    stream = batches(images, labels, seed)
    for _ in range(steps):
        x, y = next(stream)
        opt.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        opt.step()
    optfuse.drain(opt)
    with torch.no_grad():
        return 100 * float((model(held).argmax(1) == right).double().mean())


def best(name: str, delay: int, weights: str, smoke: bool) -> dict[str, Any]:
    """At the rate with the best median over the seeds."""
    make, rates = OPTIMIZERS[name]
    seeds, steps = ((0,), 20) if smoke else (SEEDS, STEPS)
    found = {
        rate: [accuracy(make, rate, delay, weights, seed, steps) for seed in seeds]
        for rate in (rates[:1] if smoke else rates)
    }
    rate = max(found, key=lambda rate: median(found[rate]))
    row = {"optimizer": name, "delay": delay, "weights": weights, "rate": rate}
    row |= {
        "accuracy": median(found[rate]),
        "lowest": min(found[rate]),
        "highest": max(found[rate]),
    }
    print(
        f"{name:6} D {delay:2}  {weights:8} lr {rate:<6g} "
        f"{row['accuracy']:5.1f} % ({row['lowest']:.1f} to {row['highest']:.1f})"
    )
    return row


def cost(smoke: bool) -> list[dict[str, Any]]:
    """Iterations of a large MLP on a small batch, where updates matter most."""
    size = 64 if smoke else 1024

    def build(wrap: Any) -> Callable[[], Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(size, size) for _ in range(6)))
        opt = wrap(torch.optim.AdamW(model.parameters(), lr=1e-4))
        x = torch.randn(16, size)

        def iteration() -> Tensor:
            opt.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            return loss

        return iteration

    def late(delay: int) -> Callable[[Any], Any]:
        def fuse(opt: torch.optim.Optimizer) -> torch.optim.Optimizer:
            steps = {p: delay for group in opt.param_groups for p in group["params"]}
            return optfuse.fuse(opt, optfuse.Forward(delay=steps))

        return fuse

    variants = {"fuse": optfuse.fuse, "D = 0": late(0), "D = 1": late(1), "D = 4": late(4)}
    rounds = {"rounds": 2, "iterations": 1} if smoke else {"rounds": 30}
    found = optfuse.ab(build, variants=variants, baseline="fuse", **rounds)
    rows = []
    for name in variants:
        row = found[name]
        assert row.ms is not None and row.speed is not None
        print(f"{name:6} {row.ms} ms, {row.speed} times as fast as fuse()")
        speed = [row.speed.median, row.speed.low, row.speed.high]
        rows.append({"variant": name, "ms": row.ms.median, "speed": speed})
    return rows


def section(chosen: Any) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    names = ["SGD"] if chosen.smoke else list(OPTIMIZERS)
    cells = [(0, "stash")]
    cells += [(d, w) for d in (DELAYS[1:2] if chosen.smoke else DELAYS[1:]) for w in WEIGHTS]
    rows = [best(name, d, w, chosen.smoke) for name in names for d, w in cells]
    torch.set_num_threads(threads)
    return {"accuracy": rows, "cost": cost(chosen.smoke)}


if __name__ == "__main__":

    class Full:
        smoke = False

    print(json.dumps(section(Full())))
