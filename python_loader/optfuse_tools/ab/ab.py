# SPDX-License-Identifier: BSD-3-Clause
"""ab(): trains the user's own model with stock and with fused optimizers, side by side.

All variants run interleaved in one process, so that whatever disturbs the
machine disturbs all of them, and each pays for all of its own updates: no
update is pending when a clock starts or stops.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from optfuse._arguments.check import (
    AB_VARIANTS,
    BUILD_FN,
    FUNCTION,
    checked,
    number,
    optional,
    refusal,
    text,
    whole,
)
from optfuse._library import machine
from optfuse._library.bindings import Error
from optfuse._trials.random_state import random_state, set_random_state
from optfuse_tools.ab.far_away import MakeTraining, far_away
from optfuse_tools.ab.progress import Progress
from optfuse_tools.ab.result import FEWEST_ROUNDS, Comparison, compare_parameters, judge, undecided
from optfuse_tools.ab.training import Training
from optfuse_tools.ab.variants import (
    VARIANTS,
    BuildFn,
    NoOptimizer,
    Wrap,
    reference,
    reference_flags,
)

REFERENCE = "reference"


def _first_able(runs: list[Training], *names: str) -> Training:
    """The first of these names that could run, else any that could."""
    able = {run.row.name: run for run in runs if not run.row.note}
    if not able:
        raise Error(f"optfuse: ab(): no variant could run: {runs[0].row.note}")
    return next((able[name] for name in names if name in able), next(iter(able.values())))


def _report(runs: list[Training], baseline: str, make: MakeTraining, **settings: Any) -> Comparison:
    """Judges the runs that could run against the baseline and the reference."""
    training = [run for run in runs if run.trains] or runs
    base = _first_able(runs, baseline, "fused=True", "default")
    right = _first_able(training, _reference_of(runs), "fused=True", "default")
    default = _first_able(training, "default")
    for run in runs:
        if not run.row.note:
            judge(run.row, base.row)
        if run.trains:
            parameters = (r.parameters() for r in (run, right, default))
            compare_parameters(run.row, *parameters)
        run.look()
    rounds = len(base.row.rounds_ms)
    steps = settings["warmup"] + rounds * (settings["iterations"] + 1)
    settings |= {"rounds": rounds, "torch": torch.__version__, "threads": torch.get_num_threads()}
    settings |= {"date": machine.date(), "cpu": machine.processor()}
    names = (base.row.name, right.row.name)
    rows = [run.row for run in runs]
    warnings = [*_untrained(runs), *undecided(rows, rounds, FEWEST_ROUNDS)]
    wrong = [*far_away(training, right, make, steps)]
    return Comparison(rows, *names, steps=steps, settings=settings, warnings=warnings, wrong=wrong)


def _untrained(runs: list[Training]) -> Iterator[str]:
    """Iterations that don't train what they were given."""
    needed = "an iteration must call backward() and the step() of what wrap() returned"
    still = [run.row.name for run in runs if run.row.trained is False]
    if still:
        yield f"no parameter changed under {', '.join(still)}: {needed}"
    idle = [
        run.row.name
        for run in runs
        if not run.row.note
        and any(isinstance(o, NoOptimizer) and not o.steps for o in run.optimizers)
    ]
    if idle and not still:
        yield f"step() was never called under {', '.join(idle)}: {needed}, not of the original"


@checked(
    build_fn=BUILD_FN,
    variants=optional(AB_VARIANTS),
    baseline=text("the name of a variant"),
    rounds=whole("a whole number of at least 1", least=1),
    iterations=whole("a whole number of at least 1", least=1),
    warmup=whole("a whole number of at least 0", least=0),
    seconds=optional(number("a number of at least 0", least=0.0)),
    seed=whole("a whole number below 2**64", least=-(2**63), most=2**64 - 1),
    progress=optional(FUNCTION),
)
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

    It is called once per variant, from the same seed (of PyTorch, Python and
    NumPy), and must give each the same model and batches. The function that it returns
    runs warmup + rounds * (iterations + 1) times, 125 if nothing else is said: a
    build_fn that draws from an iterator needs as many batches. `variants` maps a
    name to a function that takes the fresh optimizer and returns the variant's;
    default: no optimizer, as written ("default"), foreach=True, fused=True,
    backward and forward fusion. Where their bits are not those of fused=True,
    nor of the optimizer as written, a variant "reference" has the flags that
    docs/numerics.md names, as foreach=False for RMSprop(foreach=True).

    In a round each variant, in an order shuffled from `seed`, takes one untimed
    iteration and then `iterations` timed ones; the clock stops after `flush()`
    and a device synchronize. On a GPU `host_ms` is the time in which the host
    issued the work and `device_ms` the GPU's own. `rounds` is the most rounds; after
    `seconds` (at least 5 rounds) no other is begun. `progress` is called with a
    line of text after each round; without it a terminal shows where ab() is, and
    a log has a line every ten seconds. A variant that refuses the optimizer is
    reported with the reason. `speed` is the median over rounds of the baseline's
    time by the variant's. The variants share
    one heap; `page_faults` and `fault_share` tell where the memory allocator, not the
    optimizer, made the difference. `peak_mb` is the process' resident memory while the
    variant ran; the models of all variants are in it.

    Parameters are compared by bits with those of fused=True, of "reference" or,
    where fusion runs the class's own step(), of "default", and in value with those
    of "default". `wrong` names weights that have NaN, or that are more than 100 times
    as far from the reference's as PyTorch's implementations are from each other: their
    first step, the parameter and the size. The verdict begins with them.

    `warnings` says where the result means little: no parameter changed, or
    the step() of what wrap() returned was never called; fewer than 5 rounds; an
    interval of a speed that includes both 0.9 and 1.1, so that it may be a loss or
    a gain. Raises optfuse.Error for wrong arguments, and if no variant could run.
    """
    names = [*(variants or VARIANTS)]
    in_all = warmup + rounds * (iterations + 1)
    make = partial(Training, build_fn=build_fn, seed=seed, iterations=in_all)
    if baseline not in ("fused=True", *names):
        raise refusal("ab", "baseline", baseline, f"one of {', '.join(names)}")
    state = random_state()
    began = time.perf_counter()
    shown = Progress(progress)
    try:
        runs = _runs(make, variants)
        for run in runs:
            if not run.row.note:
                shown.warm_up(run.row.name)
                run.turn(warmup)
                run.look()
        deadline = math.inf if seconds is None else began + seconds
        _interleave(runs, rounds, iterations, random.Random(seed), deadline, shown)
        return _report(runs, baseline, make, iterations=iterations, warmup=warmup, seed=seed)
    finally:
        shown.clear()
        set_random_state(state)


def _runs(make: MakeTraining, variants: Mapping[str, Wrap] | None) -> list[Training]:
    runs = [make(name, wrap) for name, wrap in (variants or VARIANTS).items()]
    if variants is None and _reference_of(runs) == REFERENCE:
        beside = [run.row.name for run in runs].index("fused=True")
        runs.insert(beside + 1, make(REFERENCE, reference))
    return runs


def _reference_of(runs: list[Training]) -> str:
    """The variant whose bits fusion has; that of a name of its own is none of the usual."""
    given = [run.optimizers for run in runs if run.row.name == "default"]
    flags = [reference_flags(optimizer) for optimizers in given for optimizer in optimizers]
    if all("fused" in names for names in flags):
        return "fused=True"
    return REFERENCE if any(flags) else "default"


def _interleave(
    runs: list[Training],
    rounds: int,
    iterations: int,
    order: random.Random,
    deadline: float,
    shown: Progress,
) -> None:
    shown.begin()
    for done in range(rounds):
        if done >= FEWEST_ROUNDS and time.perf_counter() > deadline:
            return
        able = [run for run in runs if not run.row.note]
        order.shuffle(able)
        for run in able:
            shown.tick(f"optfuse.ab: round {done + 1} of {rounds}, {run.row.name}")
            run.timed_turn(iterations)
        shown.round(done + 1, rounds, deadline)
