# SPDX-License-Identifier: BSD-3-Clause
"""Measurements of one of the two processes of section kfac (this file, run with a rank): messages
and iterations of optfuse.kfac() behind a slow link, all variants interleaved."""

from __future__ import annotations

import gc
import random
import time
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any

import slow_group
import torch
import torch.distributed as dist
from data import digit_batches
from kfac_shapes import FUSIONS
from link import Network
from slow_group import SlowGroup
from torch import nn
from torch.nn.functional import cross_entropy
from two_processes import given, join, leave

import optfuse

BATCH = 16
WARM_UP, TURN = 4, 2  # iterations, and pairs of them; messages are planned in the fourth
WAITED = 1  # where iterate() has it
FEWEST, MOST = 4, 60  # rounds
NEVER = 1 << 40
EVERYWHERE = {"inverses_every": NEVER, "placement": "everywhere"}
EXPOSURE = {name: {"fusion": name, **EVERYWHERE} for name in FUSIONS}
FREE = "planned, c = 0"  # the link given, messages take nothing of the processor; else measured
EXPOSURE[FREE] = EXPOSURE["planned"]
SCHEMES = {
    "D-KFAC": {"fusion": "all", "placement": "everywhere", "inverses_every": 1},
    "MPD-KFAC": {"fusion": "all", "placement": "round_robin", "inverses_every": 1},
    "SPD-KFAC": {"fusion": "planned", "placement": "balanced", "inverses_every": 1},
}
JOBS = {"exposure": EXPOSURE, "schemes": SCHEMES}


@dataclass(frozen=True)
class Stack:
    """Wide and narrow layers in turn, as in a stack of autoencoders."""

    image: int
    wide: int
    narrow: int
    bottlenecks: int

    def build(self) -> nn.Sequential:
        layers = [self.image**2, self.wide, *[self.narrow, self.wide] * self.bottlenecks]
        parts: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(layers):
            parts += [nn.Linear(inputs, outputs), nn.Tanh()]
        return nn.Sequential(*parts, nn.Linear(self.wide, 10))


#: Behind the backward pass of the first there is time for many messages, of the second for few.
STACKS = {"14 wide layers": Stack(32, 1280, 96, 6), "32 layers": Stack(16, 384, 384, 15)}


class Run:
    """One variant in training: a model and an optimizer of its own. Both ranks have the same
    batches, so that gradients need no messages."""

    def __init__(self, options: dict[str, Any], stack: Stack) -> None:
        torch.manual_seed(0)
        self._model = stack.build()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3, momentum=0.9)
        self._optimizer.register_step_pre_hook(self._note_step)  # before that of kfac()
        how = {"process_group": dist.group.WORLD, "factors_every": 1, **options}
        self.kfac = optfuse.kfac(self._model, self._optimizer, **how)
        self._link = SlowGroup.made[-1].link
        self._batches = digit_batches(BATCH, stack.image, 1)
        self._step_began = 0.0

    def _note_step(self, *_: Any) -> None:
        self._step_began = time.perf_counter()

    def iterate(self, is_slow: bool) -> list[float]:
        """Milliseconds: the whole, what step() waits for messages, and from the beginning to
        step() and to each message with factors."""
        x, y = next(self._batches)
        self._link.is_slow = is_slow
        self._link.log.clear()
        meet()
        began = time.perf_counter()
        self._optimizer.zero_grad()
        cross_entropy(self._model(x), y).backward()
        self._optimizer.step()
        took = time.perf_counter() - began
        # The factors' messages, then how many rows each process had.
        n, log = self.kfac.summary().messages, self._link.log
        waited = max(0.0, log[n - 1][1] - self._step_began) + log[n][1] - log[n][0]
        sent = [at - began for at, _ in log[:n]]
        return [1e3 * seconds for seconds in (took, waited, self._step_began - began, *sent)]

    def turn(self) -> list[list[list[float]]]:
        """Some pairs of iterations, behind the link and without its delay, of the slower rank.
        The other one waits for that rank, too, so that the shorter wait counts."""
        self.iterate(True)  # brings this variant back into the caches
        pairs = [[self.iterate(is_slow) for is_slow in (True, False)] for _ in range(TURN)]
        slower = torch.tensor(pairs, dtype=torch.float64)
        slower[..., WAITED] *= -1
        dist.all_reduce(slower, dist.ReduceOp.MAX, group=gloo())
        slower[..., WAITED] *= -1
        found: list[list[list[float]]] = slower.tolist()
        return found


@cache
def gloo() -> dist.ProcessGroup:
    """For what is no part of the training."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def meet() -> None:
    dist.barrier(gloo())


def measure(runs: dict[str, Run], seconds: float, most: int) -> dict[str, Any]:
    """Iteration by iteration, in pairs, behind the link and without its delay."""
    pairs: dict[str, list[list[list[float]]]] = {name: [] for name in runs}
    shuffled, spent, rounds = random.Random(0), 0.0, 0
    gc.disable()
    for run in runs.values():
        for _ in range(WARM_UP):
            run.iterate(True)
    while rounds < min(FEWEST, most) or (spent < seconds and rounds < most):
        for name in shuffled.sample(list(runs), len(runs)):
            done = runs[name].turn()
            pairs[name] += done
            spent += sum(slow[0] + fast[0] for slow, fast in done) / 1e3
        rounds += 1
        gc.collect()
    return {
        "rounds": rounds,
        "slow": {name: [slow[0] for slow, _ in of] for name, of in pairs.items()},
        "fast": {name: [fast[0] for _, fast in of] for name, of in pairs.items()},
        "waited": {name: [slow[WAITED] for slow, _ in of] for name, of in pairs.items()},
        "ready": {name: [median(at) for at in zip(*(fast[2:] for _, fast in of), strict=True)]
                  for name, of in pairs.items()},
    }  # fmt: skip


def train(job: str, options: dict[str, Any]) -> dict[str, Any]:
    gloo()
    network = Network(**options["network"])
    given = {"network": (network.latency_ms / 1e3, network.ms_per_mb / 1e9, 0.0)}
    stack = Stack(**options["stack"])
    runs = {
        name: Run({**how, **(given if name == FREE else {})}, stack)
        for name, how in JOBS[job].items()
    }
    found = measure(runs, options["seconds"], options["rounds"])
    states = {name: run.kfac.state_dict() for name, run in runs.items()}
    sizes = [d for both in next(iter(runs.values())).kfac.summary().preconditioned.values()
             for d in both]  # fmt: skip
    meet()
    return {
        **found,
        "sizes": sizes,
        "order": {name: state["order"] for name, state in states.items()},
        "group": {name: state["group"] for name, state in states.items()},
    }


def work(rank: int, folder: str, job: str, options: dict[str, Any]) -> None:
    slow_group.register()
    SlowGroup.network = Network(**options["network"])
    join(rank, folder, slow_group.NAME)
    found = train(job, options)
    for group in SlowGroup.made:
        group.link.close()
    leave(rank, found)


if __name__ == "__main__":
    work(*given())
