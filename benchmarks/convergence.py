# SPDX-License-Identifier: BSD-3-Clause
"""Steps and seconds until the handwritten digits are learned to a fixed loss: SGD, AdamW, Muon,
and K-FAC with SGD. All have the same grid of rates; of each the best rate counts, by the median
over the seeds.

Also the section convergence of the benchmark; by itself:
python benchmarks/convergence.py [--model NAME] [--reference] [--to FILE]"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from data import digit_batches, digits
from torch import Tensor, nn
from torch.nn import functional

import optfuse

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
SEEDS = (0, 1, 2, 3, 4)
BATCH, MOST, EVERY = 128, 600, 5  # steps; the loss of all digits is looked at every 5
HOPELESS = 10.0  # loss
KFAC = {"factors_every": 5, "inverses_every": 10}  # damping and clip are the usual ones
MakeKfac = Callable[..., Any]
Step = Callable[[], Any]


def deep_mlp() -> nn.Sequential:
    """Ten layers of tanh, without norms or shortcuts."""
    parts: list[nn.Module] = [nn.Flatten(), nn.Linear(64, 64), nn.Tanh()]
    for _ in range(8):
        parts += [nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*parts, nn.Linear(64, 10))


def conv_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


# With the loss that ends a run, of all digits.
MODELS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "deep MLP": (deep_mlp, 0.05),
    "conv net": (conv_net, 0.05),
}


def sgd(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=True)


def adamw(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)


def muon(model: nn.Module, rate: float) -> Step:
    """Muon for matrices; the rest has AdamW with the same rate."""
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.dim() == 2]
    others = [p for p in parameters if p.dim() != 2]
    both = (
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.0),
        torch.optim.AdamW(others, lr=rate, weight_decay=0.0, fused=True),
    )
    return lambda: [optimizer.step() for optimizer in both]


def steppers(make_kfac: MakeKfac) -> dict[str, Callable[[nn.Module, float], Step]]:
    def kfac(model: nn.Module, rate: float) -> Step:
        optimizer = sgd(model, rate)
        made = make_kfac(model, optimizer, **KFAC)
        # The reference steps by itself; optfuse.kfac() is a part of the optimizer's step().
        return getattr(made, "step", optimizer.step)

    return {
        "SGD": lambda model, rate: sgd(model, rate).step,
        "AdamW": lambda model, rate: adamw(model, rate).step,
        "Muon": muon,
        "K-FAC": kfac,
    }


@dataclass(frozen=True)
class Run:
    seed: int
    steps: float  # inf: not within MOST
    seconds: float  # of training, without looking at the loss


@torch.no_grad()
def loss_of_all(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float(functional.cross_entropy(model(images), labels))


def run(build: Callable[[], nn.Module], make: Any, rate: float, target: float, seed: int) -> Run:
    torch.manual_seed(seed)
    model = build()
    step = make(model, rate)
    images, labels = digits(8)
    seconds = 0.0
    batches = digit_batches(BATCH, 8, 1, seed)
    for i in range(1, MOST + 1):
        x, y = next(batches)
        began = time.perf_counter()
        model.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        step()
        seconds += time.perf_counter() - began
        if i % EVERY == 0:
            loss = loss_of_all(model, images, labels)
            if loss <= target:
                return Run(seed, i, seconds)
            if not loss < HOPELESS:
                break
    return Run(seed, math.inf, seconds)


@dataclass(frozen=True)
class Line:
    model: str
    optimizer: str
    rate: float
    steps: float  # medians
    seconds: float
    runs: tuple[Run, ...]

    @property
    def order(self) -> tuple[float, float]:
        return self.steps, self.seconds


def lines(model: str, make_kfac: MakeKfac, rates: Iterable[float] = RATES) -> list[Line]:
    """The losses of every optimizer at every rate."""
    build, target = MODELS[model]
    found = []
    for name, make in steppers(make_kfac).items():
        for rate in rates:
            runs = tuple(run(build, make, rate, target, seed) for seed in SEEDS)
            steps, seconds = (
                median(getattr(r, what) for r in runs) for what in ("steps", "seconds")
            )
            found.append(Line(model, name, rate, steps, seconds, runs))
    return found


def table(found: list[Line]) -> list[Line]:
    """The best of each optimizer, printed with all rates beside it."""
    names = dict.fromkeys((line.model, line.optimizer) for line in found)
    best = []
    rates = "  ".join(f"{rate:>6g}" for rate in RATES)
    print(f"{'model':10}{'optimizer':10}{'steps':>6}{'seconds':>9}{'rate':>7}   steps at {rates}")
    for model, name in names:
        mine = [line for line in found if (line.model, line.optimizer) == (model, name)]
        best.append(min(mine, key=lambda line: line.order))
        each = "  ".join(f"{line.steps:6g}" for line in mine)
        b = best[-1]
        print(f"{model:10}{name:10}{b.steps:6g}{b.seconds:9.2f}{b.rate:7g}            {each}")
    return best


def timed(best: list[Line], make_kfac: MakeKfac) -> list[Line]:
    """The best of each once more, in turn for each seed, so that what disturbs one disturbs all."""
    make = steppers(make_kfac)
    again: dict[Line, list[Run]] = {line: [] for line in best}
    for seed in SEEDS:
        for line in best:
            build, target = MODELS[line.model]
            again[line].append(run(build, make[line.optimizer], line.rate, target, seed))
    found = []
    for line, runs in again.items():
        if [r.steps for r in runs] != [r.steps for r in line.runs]:
            raise RuntimeError(f"{line.optimizer} on {line.model} takes other steps each time")
        found.append(replace(line, seconds=median(r.seconds for r in runs), runs=tuple(runs)))
        print(f"{line.model:10}{line.optimizer:10}{line.steps:6g} steps {found[-1].seconds:9.2f} s")
    return found


def reference() -> MakeKfac:
    """Ours in plain torch, of the tests."""
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "python" / "kfac"))
    from kfac_reference import Reference

    return Reference


def figures(found: list[Line], best: list[Line]) -> dict[str, Any]:
    """JSON has no infinity: None is a run that did not arrive."""
    plain = {
        "options": KFAC,
        "best": [asdict(line) for line in best],
        "all": [[line.model, line.optimizer, line.rate, line.steps] for line in found],
    }
    said: dict[str, Any] = json.loads(json.dumps(plain).replace("Infinity", "null"))
    return said


def section(chosen: Any) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    names, rates = (["conv net"], RATES[3:4]) if chosen.smoke else (list(MODELS), RATES)
    found = [line for name in names for line in lines(name, optfuse.kfac, rates)]
    best = timed(table(found), optfuse.kfac)
    torch.set_num_threads(threads)
    return figures(found, best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--reference", action="store_true", help="K-FAC of the tests' reference")
    parser.add_argument("--to", type=Path, help="a file for all figures, as JSON")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    make_kfac = reference() if chosen.reference else optfuse.kfac
    found = [line for model in chosen.model or MODELS for line in lines(model, make_kfac)]
    best = timed(table(found), make_kfac)
    if chosen.to:
        kfac = "reference" if chosen.reference else "optfuse.kfac"
        text = json.dumps({"kfac": kfac, **figures(found, best)}, indent=1)
        chosen.to.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
