# SPDX-License-Identifier: BSD-3-Clause
"""One variant of ab() in training."""

from __future__ import annotations

import gc
import math
from typing import Any

import torch
from torch.optim import Optimizer

from optfuse import _fuse
from optfuse._accumulate import leave_unsaid
from optfuse._arguments.check import OPTIMIZER, argument, refusal
from optfuse._fuse import give_up_unasked
from optfuse._library.bindings import Error
from optfuse._trials.random_state import random_state, set_random_state
from optfuse_tools.ab.clock import Clock, Seconds, begin_peak, peak_mb, seed_all
from optfuse_tools.ab.page_faults import Usage
from optfuse_tools.ab.result import Row, equal_bits
from optfuse_tools.ab.variants import BuildFn, NoOptimizer, Wrap


class Refused(Exception):
    """A variant doesn't support this optimizer."""


class Training:
    """One variant in training: its own model, optimizers and random numbers."""

    def __init__(
        self, name: str, variant: Wrap, build_fn: BuildFn, seed: int, iterations: int
    ) -> None:
        """iterations: how many there will be in all."""
        self.row = Row(name)
        self.optimizers: list[Optimizer] = []
        self._done, self._iterations = 0, iterations
        self.variant = variant
        self._built: list[torch.Tensor] | None = None  # parameters, until one has changed
        seed_all(seed)
        try:
            iteration = build_fn(self._wrap)
        except Refused as refused:
            self.row.note = str(refused)
            return
        if not self.optimizers:
            raise Error("optfuse: ab(): build_fn must pass its optimizer through wrap()")
        if not callable(iteration):
            hint = "return the function, without calling it"
            expected = "a function that trains one iteration"
            raise refusal("ab", "build_fn(wrap)", iteration, expected, hint)
        self._iteration = iteration
        self._random = random_state()
        if self.trains:
            self._built = [p.clone() for p in self.parameters()]

    def _wrap(self, optimizer: Optimizer) -> Optimizer:
        argument("wrap", "optimizer", optimizer, OPTIMIZER)
        give_up_unasked(optimizer)
        try:
            wrapped = self.variant(optimizer)
        except (RuntimeError, ValueError, TypeError) as error:
            raise Refused(str(error)) from error
        if not hasattr(wrapped, "param_groups"):
            name = f"variants[{self.row.name!r}](optimizer)"
            raise refusal("ab", name, wrapped, "an optimizer", "return it")
        self.optimizers.append(wrapped)
        leave_unsaid(wrapped)
        return wrapped

    @property
    def trains(self) -> bool:
        return not self.row.note and not any(isinstance(o, NoOptimizer) for o in self.optimizers)

    def parameters(self) -> list[torch.Tensor]:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [p.detach() for group in groups for p in group["params"]]

    def look(self) -> None:
        """Whether a parameter has changed since it was built."""
        if self._built is not None and not equal_bits(self._built, self.parameters()):
            self._built = None
        self.row.trained = self._built is None if self.trains else None

    def _next(self) -> Any:
        """Runs one iteration; its loss."""
        try:
            loss = self._iteration()
        except StopIteration as error:
            raise ValueError(
                f"optfuse: ab(): the batches of build_fn(wrap) ended after {self._done}, and ab() "
                f"takes {self._iterations} for each variant, one an iteration: warmup + rounds * "
                "(iterations + 1). Make as many, begin again with itertools.cycle(), or pass "
                "fewer rounds"
            ) from error
        self._done += 1
        return loss

    def turn(self, iterations: int) -> Seconds:
        """Runs some iterations; how long that took with all their updates done."""
        set_random_state(self._random)
        losses: list[Any] = []
        collecting = gc.isenabled()
        gc.disable()
        try:
            _fuse.flush()
            clock = Clock()
            for _ in range(iterations):
                loss = self._next()
                losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)
            _fuse.flush()
            seconds = clock.stop()
        except Error as error:  # a refusal that only the first backward can see
            self.row.note, seconds = " ".join(str(error).split()), Seconds(math.nan)
        finally:
            if collecting:
                gc.enable()
        self.row.losses += [_number(loss) for loss in losses if loss is not None]
        self._random = random_state()
        return seconds

    def timed_turn(self, iterations: int) -> None:
        self.turn(1)  # brings this variant's model back into the caches
        if self.row.note:
            return
        faults, before = self.row.used.faults, Usage.now()
        begin_peak()
        seconds = self.turn(iterations)
        self.row.used.add_since(before)
        self.row.peak_mb = max(peak_mb(), self.row.peak_mb or 0.0)
        each = 1e3 / iterations
        self.row.rounds_ms.append(seconds.wall * each)
        if seconds.host is not None and seconds.device is not None:
            self.row.rounds_host_ms.append(seconds.host * each)
            self.row.rounds_device_ms.append(seconds.device * each)
        self.row.rounds_faults.append((self.row.used.faults - faults) / iterations)


def _number(loss: Any) -> float:
    try:
        return float(loss)
    except (TypeError, ValueError, RuntimeError):
        raise refusal("ab", "loss", loss, "a number, or None: what an iteration returns") from None
