# SPDX-License-Identifier: BSD-3-Clause
"""Shared by the scenarios for a device: how one is written, run and judged.

A scenario is a function that gets an `On` (a device and a mode) and raises if a
promise is broken. Most compare a *script* (see tests/python/common.py) run with
stock and with fused optimizers, bit by bit. Nothing here needs pytest: the
machine with the GPU may lack it.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import common
import scripts
import torch
from torch import nn

import optfuse

MODES = ("forward", "backward")
BOTH = ("cpu", "cuda")
Script = Callable[[Any], Iterator[tuple[str, Any]]]
PASSED, FAILED, UNSURE = "passed", "FAILED", "not judged"


class StockDiffers(Exception):
    """Stock twice in a row gave different bits, so that nothing can be said."""


@dataclass(frozen=True)
class On:
    """Where and how a scenario runs."""

    device: torch.device
    mode: str
    quick: bool = False

    @property
    def api(self) -> Any:
        """torch.cuda, or torch.cpu, whose streams have the same functions."""
        return torch.get_device_module(self.device)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def net(self) -> nn.Sequential:
        return common.net().to(self.device)

    def batch(self, i: int, n: int = 5) -> tuple[torch.Tensor, ...]:
        return tuple(t.to(self.device) for t in common.batch(i, n))

    def loss(self, model: Callable[..., torch.Tensor], i: int) -> torch.Tensor:
        x, y = self.batch(i)
        return nn.functional.mse_loss(model(x), y)

    def train(self, model: Any, optimizer: Any, i: int, set_to_none: bool = True) -> torch.Tensor:
        """One iteration; in forward mode its updates are pending afterwards."""
        optimizer.zero_grad(set_to_none)
        loss = self.loss(model, i)
        loss.backward()
        optimizer.step()
        return loss

    def trained(self, make: Any = common.adamw, model: Any = None, **more: Any) -> Script:
        """scripts.trained() on this device."""
        return scripts.trained(make, model or self.net, **{"loss": self.loss, **more})

    def same(self, script: Script, prove: bool = True, **options: Any) -> None:
        """The script yields the same bits with stock and with ours."""
        stock = common.run(script, common.Stock())
        wrap = common.Fused(self.mode, **options)
        ours = common.run(script, wrap)
        assert stock, "the script yielded nothing"
        try:
            compare(ours, stock)
        except AssertionError:
            again = common.run(script, common.Stock())
            try:
                compare(again, stock)
            except AssertionError as error:
                raise StockDiffers(str(error)) from None
            raise
        if prove:
            wrap.prove()


def compare(ours: list[Any], stock: list[Any]) -> None:
    assert len(ours) == len(stock), f"{len(ours)} yields, in stock {len(stock)}"
    for i, (a, b) in enumerate(zip(ours, stock, strict=True)):
        common.assert_same(f"yield {i}, {b[0]}", a, b)


@dataclass(frozen=True)
class Scenario:
    name: str
    body: Callable[[On], None]
    devices: tuple[str, ...]
    modes: tuple[str, ...]
    slow: bool


def scenario(
    devices: tuple[str, ...] = BOTH, modes: tuple[str, ...] = MODES, slow: bool = False
) -> Callable[[Callable[[On], None]], Callable[[On], None]]:
    """Marks a function as a scenario. slow: left out under --quick."""

    def marked(body: Callable[[On], None]) -> Callable[[On], None]:
        add(body.__name__, body, devices, modes, slow)
        return body

    return marked


SCENARIOS: dict[str, list[Scenario]] = {}  # by module


def add(
    name: str,
    body: Callable[[On], None],
    devices: tuple[str, ...] = BOTH,
    modes: tuple[str, ...] = MODES,
    slow: bool = False,
) -> None:
    one = Scenario(name.replace("_", " "), body, devices, modes, slow)
    SCENARIOS.setdefault(body.__module__, []).append(one)


@dataclass
class Outcome:
    name: str
    mode: str
    verdict: str
    seconds: float
    why: str = ""

    def __str__(self) -> str:
        text = f"{self.verdict:<10} {self.seconds:6.2f} s  {self.name} ({self.mode})"
        if not self.why:
            return text
        return text + "\n" + "\n".join(f"    {line}" for line in self.why.splitlines())


def play(one: Scenario, on: On) -> Outcome:
    began = time.perf_counter()
    verdict, why = PASSED, ""
    try:
        one.body(on)
        on.api.synchronize()
    except StockDiffers as differs:
        verdict, why = UNSURE, f"stock does not repeat its own bits here: {differs}"
    except Exception:  # whatever it is, the others go on
        verdict, why = FAILED, traceback.format_exc(limit=-4)
    optfuse_is_idle()
    gc.collect()
    return Outcome(one.name, on.mode, verdict, time.perf_counter() - began, why)


def optfuse_is_idle() -> None:
    """The pending updates of a failed scenario must not run into the next one."""
    try:
        optfuse.flush()
    except RuntimeError as error:
        print(f"flush() after a scenario failed: {error}", flush=True)
