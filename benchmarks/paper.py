# SPDX-License-Identifier: BSD-3-Clause
"""Section paper: the experiments of "Optimizer Fusion: Efficient Training with Better Locality and
Parallelism" (arXiv 2104.00237), whose baseline is PyTorch's loop over the parameters; foreach=True
and fused=True, which are younger, stand beside it.

- batch: what an iteration saves, by the number of samples. The paper: the same for each.
- share: how much faster an iteration is, by the optimizer's share of it. The paper: the more the
  larger that is.
- layers: the same number of parameters in layers of several sizes. The paper: small layers gain
  more.
- traffic: reads and writes of memory, in valgrind's simulation of caches (traffic.py)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import traffic
from cells import Cell, batches, iteration, training
from figures import Interval, columns, median_interval, of_medians, progress, title
from models import MLP
from torch.optim import SGD, Optimizer
from variants import FOR_LOOP, FOREACH

import optfuse
from optfuse._rules import RULES
from optfuse_tools.ab.variants import VARIANTS, BuildFn, Iteration, Wrap, with_flags

NONE, FUSED = "no optimizer", "fused=True"
BACKWARD, FORWARD = "backward fusion", "forward fusion"
ROUNDS, SMOKE_ROUNDS = 15, 3
BATCHES = {
    "MobileNetV2": {1: 4, 4: 3, 16: 2},
    "ResNet-18": {1: 3, 2: 2, 4: 2},
    "GPT": {1: 3, 2: 2, 4: 2},
    "MLP": {1: 10, 8: 10, 64: 6, 256: 3},
}
WIDTHS = {1024: 4, 512: 16, 256: 64, 128: 256}  # and layers: 4,194,304 parameters each
SHARED = Cell("MLP", 8, 4)  # of which the rules have shares
FOREIGN = ("AdaBelief", "AdaBound", "DiffGrad", "Yogi")  # of pytorch_optimizer, by its defaults
RATE = 1e-3

Row = dict[str, Any]


def stock() -> dict[str, Wrap]:
    """The paper's baseline and what PyTorch has now."""
    loop = partial(with_flags, foreach=False, fused=None)
    return {NONE: VARIANTS[NONE], FOR_LOOP: loop, **{n: VARIANTS[n] for n in (FOREACH, FUSED)}}


def fusions() -> dict[str, Wrap]:
    return {name: VARIANTS[name] for name in (BACKWARD, FORWARD)}


def measured(
    name: str, build: BuildFn, wraps: Mapping[str, Wrap], iterations: int, chosen: Any
) -> Row:
    """Milliseconds of each variant, what it saves of the loop's, how much faster it is than that
    and than fused=True; and the share that the loop's step() has of an iteration."""
    compared = optfuse.ab(
        build,
        variants=wraps,
        rounds=chosen.rounds or (SMOKE_ROUNDS if chosen.smoke else ROUNDS),
        iterations=iterations,
        progress=lambda message: progress(f"{name}: {message}"),
    )
    times = {row.name: row.rounds_ms for row in compared.rows if row.ms is not None}
    loop = times[FOR_LOOP]

    def by(of: list[float], own: list[float]) -> Interval:
        return median_interval([a / b for a, b in zip(of, own, strict=True)])

    ours = {
        kind: {
            "ms": median_interval(own),
            "saves_ms": median_interval([a - b for a, b in zip(loop, own, strict=True)]),
            "by_loop": by(loop, own),
            "by_fused": by(times[FUSED], own) if FUSED in times else None,
            "equal": compared[kind].equal_bits,
        }
        for kind, own in times.items()
        if kind != NONE
    }
    share = of_medians(lambda a, b: (a - b) / a, loop, times[NONE])
    return {"share": share, "ms without": median_interval(times[NONE]), "variants": ours}


def table(rows: Mapping[str, Row], key: str) -> str:
    kinds = (FOREACH, FUSED, BACKWARD, FORWARD)
    lines = [("", "share of the loop", *kinds)]
    for name, row in rows.items():
        found = [row["variants"].get(kind) for kind in kinds]
        lines.append((name, str(row["share"]), *(str(f[key]) if f else "" for f in found)))
    return columns(lines)


def by_batch(chosen: Any) -> dict[str, Row]:
    found = {}
    for model, sizes in BATCHES.items():
        for batch, iterations in sizes.items():
            if chosen.smoke and (model, batch) != ("MLP", 8):
                continue
            build = training(Cell(model, batch, iterations), "adamw")
            name = f"{model}, {batch}"
            row = measured(name, build, {**stock(), **fusions()}, iterations, chosen)
            found[name] = {"model": model, "batch": batch, **row}
    title("Milliseconds an iteration saves of the loop's, AdamW, by model and batch")
    print(table(found, "saves_ms"))
    return found


def foreign() -> Iterator[type[Optimizer]]:
    try:
        package = importlib.import_module("pytorch_optimizer")
    except ImportError:
        print("left out: pytorch_optimizer's classes (see --packages)")
        return
    for name in FOREIGN:
        yield getattr(package, name)


def built(cls: Callable[..., Optimizer], model: Callable[[], MLP], batch: int) -> BuildFn:
    def build(wrap: Wrap) -> Iteration:
        net = model()
        opt = wrap(cls(net.parameters(), lr=RATE))
        return iteration(net, opt, batches(Cell("MLP", batch, 1)))

    return build


def by_share(chosen: Any) -> dict[str, Row]:
    """Classes without a flag for their loop are one."""
    found = {}
    classes: dict[str, Callable[..., Optimizer]] = {
        f"{'optfuse ' * cls.__module__.startswith('optfuse')}{cls.__name__}": cls for cls in RULES
    }
    classes["SGD, momentum"] = partial(SGD, momentum=0.9)
    classes |= {cls.__name__: cls for cls in foreign()}
    for name, cls in list(classes.items())[: 2 if chosen.smoke else None]:
        flags = cls([torch.nn.Parameter(torch.ones(1))], lr=RATE).defaults
        wraps = stock() if "foreach" in flags else {NONE: VARIANTS[NONE], FOR_LOOP: as_it_is}
        if "fused" not in flags:
            wraps.pop(FUSED, None)
        build = built(cls, MLP, SHARED.batch)
        found[name] = measured(name, build, {**wraps, **fusions()}, SHARED.iterations, chosen)
    ordered = sorted(found.items(), key=lambda item: item[1]["share"].median)
    title("Times as fast as the loop, MLP of 20 layers of 512, batch 8, by the optimizer's share")
    print(table(dict(ordered), "by_loop"))
    return dict(ordered)


def as_it_is(optimizer: Optimizer) -> Optimizer:
    return optimizer


def by_layers(chosen: Any) -> dict[str, Row]:
    found = {}
    for width, layers in WIDTHS.items():
        if chosen.smoke and width != 512:
            continue
        build = built(torch.optim.AdamW, partial(MLP, width, layers), SHARED.batch)
        name = f"{layers} x {width}"
        row = measured(name, build, {**stock(), **fusions()}, 3, chosen)
        found[name] = {"parameters": width * width, **row}
    title("Times as fast as the loop, AdamW, 4 million parameters in layers of several sizes")
    print(table(found, "by_loop"))
    return found


def section(chosen: Any) -> dict[str, Any]:
    parts = {"batch": by_batch, "share": by_share, "layers": by_layers, "traffic": traffic.count}
    return {name: part(chosen) for name, part in parts.items()}
