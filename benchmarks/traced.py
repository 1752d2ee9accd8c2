# SPDX-License-Identifier: BSD-3-Clause
"""Section traced: step() and its updates of ten classes of another package, by themselves and
traced, and what one run of step() on stand-ins costs. The classes were named before they were
measured.

    python -m pip install --target DIR pytorch_optimizer
    benchmarks/run --section traced --packages DIR"""

from __future__ import annotations

import copy
import importlib
import time
from typing import Any

import torch
from models import MobileNetV2
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import optfuse
from optfuse._ab.result import median_interval
from optfuse._link import link_of

PACKAGE = "pytorch_optimizer"
NAMES = ("AdaBelief", "Lion", "Yogi", "AdaMod", "AdaBound", "ADOPT", "RAdam", "Tiger", "PNM")
NAMES += ("AdEMAMix",)
ROUNDS = {"20 x 1,000,000": 9, "300 x 1,000": 40, "MobileNetV2": 40}


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


def guide_ms(optimizer: Optimizer, params: list[nn.Parameter]) -> float:
    """One run of step() on stand-ins and what belongs to it: of a step without updates."""
    traced = link_of(optimizer).traced
    assert traced is not None
    found = []
    for _ in range(20):
        began = time.perf_counter()
        traced.begin(optimizer, list(params), whole=False, same_state=False)
        found.append(1e3 * (time.perf_counter() - began) / max(1, traced.guides))
    traced.abandon(optimizer, list(params))
    return median_interval(found).median


def measure(cls: type[Optimizer], name: str, smoke: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in shapes(name, smoke)]
    grads = [torch.randn_like(value) for value in values]
    pairs = []
    for wrap in (lambda optimizer: optimizer, optfuse.fuse):
        params = [nn.Parameter(value.clone()) for value in values]
        pairs.append((wrap(cls(params, lr=1e-3)), params))  # type: ignore[call-arg]
    times: list[list[float]] = [[], []]
    for turn in range(2 + (2 if smoke else ROUNDS[name])):
        for i in (0, 1) if turn % 2 else (1, 0):
            times[i].append(seconds(pairs[i][0], grads, pairs[i][1]))
    own, traced = ([1e3 * t for t in found[2:]] for found in times)
    gain = median_interval([a / b for a, b in zip(own, traced, strict=True)])
    for a, b in zip(pairs[0][1], pairs[1][1], strict=True):
        assert torch.equal(a.detach(), b.detach()), f"{cls.__name__} has other bits"
    row = {"own_ms": median_interval(own).median, "traced_ms": median_interval(traced).median}
    row |= {"gain": [gain.median, gain.low, gain.high]}
    row |= {"guide_ms": guide_ms(pairs[1][0], pairs[1][1])}
    print(
        f"  {cls.__name__:12}{row['own_ms']:9.2f} ms by itself {row['traced_ms']:9.2f} traced, "
        f"{gain} times as fast; a guide {row['guide_ms']:.2f} ms"
    )
    return copy.deepcopy(row)


def section(chosen: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ROUNDS:
        print(f"{name}, {torch.get_num_threads()} threads:")
        rows = {n: measure(cls, name, chosen.smoke) for n, cls in classes(chosen.smoke).items()}
        middle = median_interval([row["gain"][0] for row in rows.values()]).median
        print(f"  median of the classes: {middle:.2f} times as fast")
        found[name] = {"median gain": middle, "classes": rows}
    return {"package": PACKAGE, "sizes": found}
