# SPDX-License-Identifier: BSD-3-Clause
"""ab(): trains the user's own model with stock and with fused optimizers, side by side.

All variants run interleaved in one process, so that whatever disturbs the
machine disturbs all of them, and each pays for all of its own updates: no
update is pending when a clock starts or stops.
"""

from __future__ import annotations

import gc
import inspect
import math
import random
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

import optfuse
from optfuse._ab_result import Comparison, Row, compare_parameters, judge

Wrap = Callable[[Optimizer], Optimizer]
Iteration = Callable[[], "torch.Tensor | float | None"]
BuildFn = Callable[[Wrap], Iteration]

FEWEST_ROUNDS = 5  # whatever ab()'s limit in seconds


class NoOptimizer(Optimizer):
    """Has the groups and the zero_grad() of the given optimizer; step() updates nothing."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()


def with_flags(optimizer: Optimizer, **flags: bool | None) -> Optimizer:
    """A new stock optimizer like the given one, with other implementation flags."""
    kind = type(optimizer)
    missing = [name for name, value in flags.items() if value and name not in optimizer.defaults]
    if missing:
        raise ValueError(f"{kind.__name__} has no {missing[0]}")
    flags = {name: value for name, value in flags.items() if name in optimizer.defaults}
    accepted = inspect.signature(kind).parameters
    options = {k: v for k, v in {**optimizer.defaults, **flags}.items() if k in accepted}
    return kind([{**group, **flags} for group in optimizer.param_groups], **options)


#: What ab() compares by default. The names also choose ab()'s baseline.
VARIANTS: Mapping[str, Wrap] = {
    "no optimizer": NoOptimizer,
    "default": lambda optimizer: optimizer,
    "foreach=True": partial(with_flags, foreach=True, fused=None),
    "fused=True": partial(with_flags, fused=True, foreach=None),
    "backward fusion": lambda optimizer: optfuse.fuse(optimizer, mode="backward"),
    "forward fusion": lambda optimizer: optfuse.fuse(optimizer, mode="forward"),
}


class _Refused(Exception):
    """A variant doesn't support this optimizer."""


class _Run:
    """One variant in training: its own model, optimizers and random numbers."""

    def __init__(self, name: str, variant: Wrap, build_fn: BuildFn, seed: int) -> None:
        self.row = Row(name)
        self.optimizers: list[Optimizer] = []
        self._variant = variant
        torch.manual_seed(seed)
        random.seed(seed)
        try:
            self._iteration = build_fn(self._wrap)
        except _Refused as refusal:
            self.row.note = str(refusal)
            return
        if not self.optimizers:
            raise optfuse.Error("ab: build_fn must pass its optimizer through wrap()")
        self._random = _random_state()

    def _wrap(self, optimizer: Optimizer) -> Optimizer:
        try:
            wrapped = self._variant(optimizer)
        except (RuntimeError, ValueError, TypeError) as error:
            raise _Refused(str(error)) from error
        self.optimizers.append(wrapped)
        return wrapped

    @property
    def trains(self) -> bool:
        return not self.row.note and not any(isinstance(o, NoOptimizer) for o in self.optimizers)

    def parameters(self) -> list[torch.Tensor]:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [p.detach() for group in groups for p in group["params"]]

    def turn(self, iterations: int) -> _Seconds:
        """Runs some iterations; how long that took with all their updates done."""
        _set_random_state(self._random)
        losses: list[Any] = []
        collecting = gc.isenabled()
        gc.disable()
        try:
            optfuse.flush()
            clock = _Clock()
            for _ in range(iterations):
                loss = self._iteration()
                losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)
            optfuse.flush()
            seconds = clock.stop()
        except optfuse.Error as error:  # a refusal that only the first backward can see
            self.row.note, seconds = str(error), _Seconds(math.nan)
        finally:
            if collecting:
                gc.enable()
        self.row.losses += [float(loss) for loss in losses if loss is not None]
        self._random = _random_state()
        return seconds

    def timed_turn(self, iterations: int) -> None:
        self.turn(1)  # brings this variant's model back into the caches
        if self.row.note:
            return
        faults = _page_faults()
        seconds = self.turn(iterations)
        each = 1e3 / iterations
        self.row.rounds_ms.append(seconds.wall * each)
        if seconds.host is not None and seconds.device is not None:
            self.row.rounds_host_ms.append(seconds.host * each)
            self.row.rounds_device_ms.append(seconds.device * each)
        self.row.rounds_faults.append((_page_faults() - faults) / iterations)


@dataclass(frozen=True)
class _Seconds:
    """`wall` ends when the device has done all; where there is a GPU, `host`
    ends when the host has issued all, and `device` is the GPU's own time."""

    wall: float
    host: float | None = None
    device: float | None = None


class _Clock:
    """Runs from here to stop(), and waits for the GPU only there and here."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        if torch.cuda.is_initialized():
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda.synchronize()
            self._events[0].record()
        self._start = time.perf_counter()

    def stop(self) -> _Seconds:
        host = time.perf_counter() - self._start
        if not self._events:
            return _Seconds(host)
        start, end = self._events
        end.record()
        torch.cuda.synchronize()
        wall = time.perf_counter() - self._start
        return _Seconds(wall, host, start.elapsed_time(end) / 1e3)


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _random_state() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return random.getstate(), torch.get_rng_state(), cuda


def _set_random_state(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    torch.set_rng_state(state[1])
    if state[2]:
        torch.cuda.set_rng_state_all(state[2])


def _first_able(runs: list[_Run], *names: str) -> _Run:
    """The first of these names that could run, else any that could."""
    able = {run.row.name: run for run in runs if not run.row.note}
    if not able:
        raise optfuse.Error(f"ab: no variant could run: {runs[0].row.note}")
    return next((able[name] for name in names if name in able), next(iter(able.values())))


def _report(runs: list[_Run], baseline: str, **settings: Any) -> Comparison:
    """Judges the runs that could run against the baseline and the reference."""
    training = [run for run in runs if run.trains] or runs
    base = _first_able(runs, baseline, "fused=True", "default")
    reference = _first_able(training, "fused=True", "default")
    default = _first_able(training, "default")
    for run in runs:
        if not run.row.note:
            judge(run.row, base.row)
        if run.trains:
            parameters = (r.parameters() for r in (run, reference, default))
            compare_parameters(run.row, *parameters)
    rounds = len(base.row.rounds_ms)
    steps = settings["warmup"] + rounds * (settings["iterations"] + 1)
    settings |= {"rounds": rounds, "torch": torch.__version__, "threads": torch.get_num_threads()}
    names = (base.row.name, reference.row.name)
    return Comparison([run.row for run in runs], *names, steps=steps, settings=settings)


def ab(
    build_fn: BuildFn,
    *,
    variants: Mapping[str, Wrap] | None = None,
    baseline: str = "fused=True",
    rounds: int = 20,
    iterations: int = 5,
    warmup: int = 5,
    seconds: float | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Trains what `build_fn` builds with each variant of its optimizer, interleaved.

    `build_fn(wrap)` makes a model and its optimizer, passes the optimizer
    through `wrap`, and returns a function that runs one training iteration and
    returns the loss::

        def build(wrap):
            model = Net()
            opt = wrap(torch.optim.AdamW(model.parameters(), lr=3e-4))
            batches = iter(make_batches())

            def iteration():
                x, y = next(batches)
                opt.zero_grad()
                loss = cross_entropy(model(x), y)
                loss.backward()
                opt.step()
                return loss

            return iteration

        print(optfuse.ab(build))

    It is called once per variant, from the same seed, and must give each the
    same model and batches. `variants` maps a name to a function that takes the
    fresh optimizer and returns the variant's; default: no optimizer, as given
    ("default"), foreach=True, fused=True, backward and forward fusion.

    In a round each variant, in an order shuffled from `seed`, takes one untimed
    iteration and then `iterations` timed ones; the clock stops after `flush()`
    and a device synchronize. On a GPU `host_ms` is the time in which the host
    issued the work and `device_ms` the GPU's own. `rounds` is the most rounds; after `seconds` (at
    least 5 rounds) no other is begun. A variant that refuses the optimizer is
    reported with the reason. `speed` is the median over rounds of the
    baseline's time by the variant's. The variants share one heap; `page_faults`
    tells where the memory allocator, not the optimizer, made the difference.

    Parameters are compared by bits with fused=True's (the default variant's if
    the optimizer has no fused=True), and in value with the default variant's.
    """
    if rounds < 1 or iterations < 1:
        raise ValueError("ab: rounds and iterations must be at least 1")
    state = _random_state()
    began = time.perf_counter()
    try:
        named = (variants or VARIANTS).items()
        runs = [_Run(name, variant, build_fn, seed) for name, variant in named]
        for run in runs:
            if not run.row.note:
                run.turn(warmup)
        deadline = math.inf if seconds is None else began + seconds
        _interleave(runs, rounds, iterations, random.Random(seed), deadline, progress)
    finally:
        _set_random_state(state)
    return _report(runs, baseline, iterations=iterations, warmup=warmup, seed=seed)


def _interleave(
    runs: list[_Run],
    rounds: int,
    iterations: int,
    order: random.Random,
    deadline: float,
    progress: Callable[[str], None] | None,
) -> None:
    for done in range(rounds):
        if done >= FEWEST_ROUNDS and time.perf_counter() > deadline:
            return
        able = [run for run in runs if not run.row.note]
        order.shuffle(able)
        for run in able:
            run.timed_turn(iterations)
        if progress is not None:
            progress(f"round {done + 1} of {rounds}")
