# SPDX-License-Identifier: BSD-3-Clause
"""Section recorded: ten classes of another package, named before they were measured, by themselves
(as made, with foreach=False and with foreach=True) and recorded: step() in forward mode, whole
iterations of three models in both modes, and memory. Then classes of torch.optim that have a rule,
by that rule and, as a subclass, recorded.

    python -m pip install --target DIR pytorch_optimizer
    benchmarks/run --section recorded --packages DIR"""

from __future__ import annotations

import importlib
import multiprocessing
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cells import GRID_CELLS, MODELS, Cell, batches, iteration
from models import MobileNetV2
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import optfuse
from optfuse_tools.ab.result import Interval, median_interval
from optfuse_tools.ab.variants import with_flags

PACKAGE = "pytorch_optimizer"
NAMES = ("AdaBelief", "Lion", "Yogi", "AdaMod", "AdaBound", "ADOPT", "RAdam", "Tiger", "PNM")
NAMES += ("AdEMAMix",)
# Classes of torch.optim with rules for their operators one by one, which a program could replace.
RULED = ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
ROUNDS = {"20 x 1,000,000": 9, "300 x 1,000": 40, "MobileNetV2": 40}
TRAINED = {"MobileNetV2": 1, "MLP-200x64": 8, "GPT": 1}  # and batches
SECONDS = 4.0  # of whole iterations
Wrap = Callable[[Optimizer], Optimizer]
WAYS: dict[str, Wrap] = {
    "recorded": optfuse.fuse,
    "own": lambda optimizer: optimizer,
    "loop": partial(with_flags, foreach=False),
    "foreach": partial(with_flags, foreach=True),
}


class Plain(AdamW):
    """Where the package is missing: a class that has no rule."""


def shapes(name: str, smoke: bool) -> list[tuple[int, ...]]:
    if name == "MobileNetV2":
        return [tuple(p.shape) for p in MobileNetV2().parameters()]
    if smoke:
        return 3 * [(1000,)]
    return 300 * [(1000,)] if name.startswith("300") else 20 * [(1_000_000,)]


def classes(smoke: bool) -> dict[str, type[Optimizer]]:
    try:
        package = importlib.import_module(PACKAGE)
    except ImportError:
        if not smoke:
            raise SystemExit(f"{PACKAGE} is not there: see --packages") from None
        return {"Plain": Plain}
    return {name: getattr(package, name) for name in NAMES[: 1 if smoke else None]}


def seconds(optimizer: Optimizer, grads: list[Tensor], params: list[nn.Parameter]) -> float:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()  # some classes write it
    began = time.perf_counter()
    optimizer.step()
    if hasattr(optimizer, "_optfuse_link"):
        optfuse.flush(optimizer)
    return time.perf_counter() - began


Made = Callable[[list[nn.Parameter]], Optimizer]


def times(made: dict[str, Made], of: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of step() and its updates, of several optimizers in turn."""
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in shapes(of, rounds < 3)]
    grads = [torch.randn_like(value) for value in values]
    params = {name: [nn.Parameter(value.clone()) for value in values] for name in made}
    optimizers = {name: make(params[name]) for name, make in made.items()}
    found: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(2 + rounds):
        for name in list(made)[:: 1 if turn % 2 else -1]:
            found[name].append(1e3 * seconds(optimizers[name], grads, params[name]))
    return {name: row[2:] for name, row in found.items()}


def ratio(a: list[float], b: list[float]) -> Interval:
    return median_interval([x / y for x, y in zip(a, b, strict=True)])


def ways_of(cls: type[Optimizer]) -> dict[str, Made]:
    """Those that the class has."""
    found: dict[str, Made] = {}
    for name, wrap in WAYS.items():
        try:
            wrap(cls([nn.Parameter(torch.zeros(2))], lr=1e-3))  # type: ignore[call-arg]
        except (TypeError, ValueError):
            continue
        found[name] = partial(_make, cls, wrap)
    return found


def _make(cls: Any, wrap: Wrap, params: list[nn.Parameter]) -> Optimizer:
    return wrap(cls(params, lr=1e-3))


def updates(cls: type[Optimizer], of: str, smoke: bool) -> dict[str, Any]:
    """How many times as fast the recorded step() is as the others."""
    ms = times(ways_of(cls), of, 2 if smoke else ROUNDS[of])
    row: dict[str, Any] = {f"{name}_ms": median_interval(ms[name]).median for name in ms}
    gains = {name: ratio(ms[name], ms["recorded"]) for name in ms if name != "recorded"}
    row |= {f"{name} / recorded": shown(gain) for name, gain in gains.items()}
    others = ", ".join(f"{gain} {name}" for name, gain in gains.items())
    print(f"  {cls.__name__:12}{row['recorded_ms']:9.2f} ms recorded, times as fast as: {others}")
    return row


def shown(interval: Interval) -> list[float]:
    return [interval.median, interval.low, interval.high]


def trained(cls: type[Optimizer], cell: Cell, smoke: bool) -> dict[str, Any]:
    """Whole iterations: how many times as fast as with the class as it is."""

    def build(wrap: Wrap) -> Any:
        model = MODELS[cell.model]()
        optimizer = cls(model.parameters(), lr=1e-3)  # type: ignore[call-arg]
        return iteration(model, wrap(optimizer), batches(cell))

    variants: dict[str, Wrap] = {
        "default": WAYS["own"],
        "backward": partial(optfuse.fuse, mode="backward"),
        "forward": WAYS["recorded"],
    }
    found = optfuse.ab(
        build,
        variants=variants,
        baseline="default",
        rounds=2 if smoke else 200,
        iterations=1 if smoke else cell.iterations,
        seconds=0.0 if smoke else SECONDS,
        progress=lambda line: None,
    )
    rows = {row.name: row for row in found.rows}
    for mode in ("backward", "forward"):
        assert not rows[mode].note and rows[mode].max_difference == 0, f"{cls.__name__}, {mode}"
    print(f"  {cls.__name__:12} backward {rows['backward'].speed}, forward {rows['forward'].speed}")
    return {mode: shown(rows[mode].speed) for mode in ("backward", "forward")}


def peak_mb(package: str, name: str, of: str, is_recorded: bool, smoke: bool) -> float:
    """The peak memory of a process that takes three steps, above what there is before the first."""
    cls = classes(smoke)[name]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes(of, smoke)]
    optimizer = WAYS["recorded" if is_recorded else "own"](cls(params, lr=1e-3))  # type: ignore[call-arg]
    grads = [torch.randn_like(p) for p in params]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _most_mb()
    for _ in range(3):
        seconds(optimizer, grads, params)
    return _most_mb() - before


def _most_mb() -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def memory(name: str, smoke: bool) -> dict[str, float]:
    """In processes of their own."""
    found = {}
    for way, is_recorded in (("own", False), ("recorded", True)):
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context, initializer=sys.path.extend,
                                 initargs=(sys.path,)) as pool:  # fmt: skip
            of = "20 x 1,000,000"
            found[f"{way}_mb"] = pool.submit(
                peak_mb, PACKAGE, name, of, is_recorded, smoke
            ).result()
    print(f"  {name:12} {found['own_mb']:.0f} MB by itself, {found['recorded_mb']:.0f} recorded")
    return found


def ruled(name: str, of: str, smoke: bool) -> dict[str, Any]:
    """A class of torch.optim by its rule, and a subclass of it, which has none, recorded."""
    cls: Any = getattr(torch.optim, name)
    made = {
        "rule": lambda params: optfuse.fuse(cls(params, lr=1e-3, foreach=False)),
        "recorded": lambda params: optfuse.fuse(
            type(name, (cls,), {})(params, lr=1e-3, foreach=False)
        ),
    }
    ms = times(made, of, 2 if smoke else ROUNDS[of])
    gain = ratio(ms["recorded"], ms["rule"])
    row = {f"{way}_ms": median_interval(ms[way]).median for way in made}
    print(f"  {name:12} {row['rule_ms']:.2f} ms by its rule, {gain} times as fast as recorded")
    return row | {"recorded / rule": shown(gain)}


def section(chosen: Any) -> dict[str, Any]:
    smoke = chosen.smoke
    found: dict[str, Any] = {"package": PACKAGE, "updates": {}, "iterations": {}, "rules": {}}
    known = classes(smoke)
    for of in ROUNDS:
        print(f"{of}, {torch.get_num_threads()} threads:")
        rows = {name: updates(cls, of, smoke) for name, cls in known.items()}
        gains = [row["own / recorded"][0] for row in rows.values()]
        middle = median_interval(gains).median
        print(f"  median of the classes: {middle:.2f} times as fast")
        found["updates"][of] = {"median gain": middle, "classes": rows}
    for cell in GRID_CELLS:
        if TRAINED.get(cell.model) == cell.batch and (not smoke or cell.model == "MobileNetV2"):
            print(f"whole iterations of {cell}:")
            rows = {name: trained(cls, cell, smoke) for name, cls in known.items()}
            found["iterations"][str(cell)] = rows
    print("peak memory of steps, 20 x 1,000,000:")
    found["memory"] = {name: memory(name, smoke) for name in known}
    for of in ("20 x 1,000,000", "MobileNetV2"):
        print(f"torch.optim by rules and recorded, {of}:")
        found["rules"][of] = {
            name: ruled(name, of, smoke) for name in RULED[: 1 if smoke else None]
        }
    return found
