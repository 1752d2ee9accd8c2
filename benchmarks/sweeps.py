# SPDX-License-Identifier: BSD-3-Clause
"""The two experiments of the paper (arXiv 2104.00237): over the batch the saved
milliseconds should stay about the same, and over the parameters of a layer the
gain should grow as layers get smaller."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from cells import OPTIMIZERS, Cell, training
from console import columns, progress, title
from data import digit_batches
from models import MLP
from resample import of_medians
from torch import Tensor
from torch.nn.functional import cross_entropy
from variants import few_variants

import optfuse
from optfuse._ab.result import Comparison, Interval
from optfuse._ab.variants import BuildFn, Iteration, Wrap

STOCK = ("default", "fused=True")
OURS = ("backward fusion", "forward fusion")
BATCHES = {"MobileNetV2": (1, 2, 4, 8, 16, 32, 64), "MLP": (1, 2, 4, 8, 16, 32, 64, 128)}
#: Layers and width: always 4 M parameters in the hidden layers.
LAYERS = ((1, 2048), (4, 1024), (16, 512), (64, 256), (256, 128), (1024, 64))
LAYER_BATCH = 8
ROUNDS = 15


@dataclass(frozen=True)
class Gain:
    """Of one of ours against one of stock's, at one place of the sweep."""

    sweep: str
    at: int  # the batch, or the parameters of a layer
    ours: str
    stock: str
    stock_ms: float
    saved_ms: Interval
    speed: Interval


def gains(sweep: str, at: int, compared: Comparison) -> list[Gain]:
    ms = {row.name: row.rounds_ms for row in compared.rows if row.ms is not None}
    return [
        Gain(
            sweep,
            at,
            ours,
            stock,
            of_medians(lambda s: s, ms[stock]).median,
            of_medians(lambda s, o: s - o, ms[stock], ms[ours]),
            of_medians(lambda s, o: s / o, ms[stock], ms[ours]),
        )
        for ours in OURS
        for stock in STOCK
    ]


def compare(build: BuildFn, rounds: int, iterations: int) -> Comparison:
    wraps = {name: wrap for name, wrap in few_variants().items() if name in STOCK + OURS}
    return optfuse.ab(build, variants=wraps, rounds=rounds, iterations=iterations, warmup=2)


def over_batches(optimizer: str, model: str, rounds: int, most: int) -> list[Gain]:
    found = []
    for batch in (b for b in BATCHES[model] if b <= most):
        progress(f"sweeps: {model}, batch {batch}")
        cell = Cell(model, batch, max(1, 8 // batch))
        compared = compare(training(cell, optimizer), rounds, cell.iterations)
        found += gains(f"batch, {model}", batch, compared)
    return found


def layered(optimizer: str, layers: int, width: int) -> BuildFn:
    def build(wrap: Wrap) -> Iteration:
        model = MLP(width, layers)
        opt = wrap(OPTIMIZERS[optimizer](model.parameters()))
        stream = digit_batches(LAYER_BATCH, 8, 1)

        def iteration() -> Tensor:
            x, y = next(stream)
            opt.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss

        return iteration

    return build


def over_layers(optimizer: str, rounds: int) -> list[Gain]:
    found = []
    for layers, width in LAYERS:
        progress(f"sweeps: {layers} layers of width {width}")
        compared = compare(layered(optimizer, layers, width), rounds, 4)
        found += gains("parameters of a layer", width * width, compared)
    return found


def table(found: list[Gain]) -> str:
    head = [found[0].sweep]
    head += [f"{stock}, ms" for stock in STOCK]
    head += [f"{ours}: saved ms, x {stock}" for ours in OURS for stock in STOCK]
    rows = [head]
    for at in dict.fromkeys(gain.at for gain in found):
        here = {(gain.ours, gain.stock): gain for gain in found if gain.at == at}
        row = [f"{at:,}"] + [f"{here[OURS[0], stock].stock_ms:.1f}" for stock in STOCK]
        for gain in here.values():
            row.append(f"{gain.saved_ms}, {gain.speed.median:.2f}")
        rows.append(row)
    return columns(rows)


def section(chosen: Any) -> dict[str, Any]:
    rounds = chosen.rounds or (3 if chosen.smoke else 5 if chosen.quick else ROUNDS)
    most = 2 if chosen.smoke else 8 if chosen.quick else 128
    everything: list[Gain] = []
    title(f"The paper's sweeps, {chosen.optimizer}, {torch.get_num_threads()} threads")
    for model in BATCHES:
        if not chosen.model or model in chosen.model:
            found = over_batches(chosen.optimizer, model, rounds, most)
            progress("")
            print(table(found), flush=True)
            everything += found
    if not chosen.model:
        found = over_layers(chosen.optimizer, rounds)
        progress("")
        print(f"4 M parameters in square layers, batch {LAYER_BATCH}")
        print(table(found))
        everything += found
    if not chosen.no_plot:
        plot(chosen, everything)
    return {"gains": [asdict(gain) for gain in everything]}


def plot(chosen: Any, found: list[Gain]) -> None:
    """Saved milliseconds over the batch, speed over the size of a layer; both
    against the default, as in the paper, and against fused=True."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is missing: there is no plot")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    sweeps = list(dict.fromkeys(gain.sweep for gain in found))
    figure, sides = pyplot.subplots(
        1, len(sweeps), figsize=(5 * len(sweeps), 5), layout="constrained", squeeze=False
    )
    for axes, sweep in zip(sides[0], sweeps, strict=True):
        of_batch = sweep.startswith("batch")
        for ours, color in zip(OURS, ("tab:blue", "tab:orange"), strict=True):
            for stock, style in zip(STOCK, ("--", "-"), strict=True):
                line = [g for g in found if (g.sweep, g.ours, g.stock) == (sweep, ours, stock)]
                y = [g.saved_ms if of_batch else g.speed for g in line]
                error = [
                    [max(0.0, v.median - v.low) for v in y],
                    [max(0.0, v.high - v.median) for v in y],
                ]
                label = f"{ours} against {stock}"
                at, height = [g.at for g in line], [v.median for v in y]
                axes.errorbar(at, height, error, color=color, linestyle=style, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xlabel(sweep)
        axes.set_ylabel("saved ms an iteration" if of_batch else "times as fast")
        axes.legend(fontsize="x-small")
    chosen.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(chosen.out / f"sweeps-{chosen.optimizer}.png", dpi=120)
    pyplot.close(figure)
