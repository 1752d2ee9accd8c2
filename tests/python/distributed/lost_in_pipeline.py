# SPDX-License-Identifier: BSD-3-Clause
"""Pipelines of which one process goes wrong, and what stopped each (apart.py)."""

import functools
import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import apart
import torch
import torch._dynamo
import torch.distributed as dist
from apart import PATIENCE
from torch import nn

from optfuse.pipeline import Pipeline, plan
from optfuse_layers.pipeline.transport import Transport

LATE = 20.0  # seconds: the time-out where a process does not come
COUNT = 8  # batches


class Case(NamedTuple):
    world: int
    wrong: int  # the process that goes wrong
    where: str  # "layer", "loss", "optimizer", "inputs", "between"
    how: str = "raises"  # "killed", "stays away"
    strategy: str = "1f1b"
    timeout: float = PATIENCE
    store: str = "file"
    off: str = ""  # the guard that is off


def cases():
    """By names."""
    for world in (2, 3):
        for wrong in range(world):
            yield Case(world, wrong, "layer")
            yield Case(world, wrong, "layer", "killed", strategy="layerpipe")
            yield Case(world, wrong, "layer", "killed", strategy="fast_forward")
        yield Case(world, world - 1, "loss")
        yield Case(world, 0, "optimizer", strategy="layerpipe")
        yield Case(world, 0, "inputs")
        yield Case(world, world - 1, "between", "killed")
    yield Case(3, 0, "between", "killed")
    yield Case(3, 1, "between", "stays away", timeout=LATE)
    yield Case(3, 0, "layer", "killed", store="tcp")
    yield Case(3, 1, "between", "stays away", strategy="fast_forward", timeout=LATE)
    yield Case(2, 1, "loss", timeout=LATE, off="fail")
    yield Case(3, 0, "layer", off="_first")


def name_of(case):
    """Such as "3 processes, 1 killed in layer"."""
    words = f"{case.world} processes, {case.wrong} {case.how} in {case.where}"
    special = [case.store] * (case.store != "file") + [f"without {case.off}"] * bool(case.off)
    special += ["fast_forward"] * (case.strategy == "fast_forward")
    return ", ".join([words, *special])


CASES = {name_of(case): case for case in cases()}


class GivesUp:
    """Fails in this process, at the fifth call."""

    def __init__(self, case):
        self.case, self.calls = case, 0

    def __call__(self, where):
        self.calls += where == self.case.where
        if self.calls != 5 or dist.get_rank() != self.case.wrong:
            return
        self.calls += 1
        if self.case.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("this process gives up")


class Layer(nn.Tanh):
    def __init__(self, check):
        super().__init__()
        self.check = check

    def forward(self, x):
        if not x.is_meta:
            self.check("layer")
        return super().forward(x)


class Sgd(torch.optim.SGD):
    def __init__(self, parameters, check):
        super().__init__(parameters, lr=0.1)
        self.check = check

    def step(self, closure=None):
        self.check("optimizer")
        return super().step(closure)


def loss_fn(check, y, target):
    check("loss")
    return nn.functional.cross_entropy(y, target)


def pipeline_of(case, check):
    torch.manual_seed(0)
    pairs = 2 * case.world
    model = nn.Sequential(*(m for _ in range(pairs) for m in (nn.Linear(16, 16), Layer(check))))
    costs = [(1, 1, 1, 0), (0.1, 0.1, 0, 0)] * pairs
    x = torch.zeros(4, 16)
    options = {"micro_batches": 4} if case.strategy == "fast_forward" else {}
    made = plan(model, x, case.world, case.strategy, network=(0, 0), costs=costs, **options)
    loss = functools.partial(loss_fn, check)
    return Pipeline(made, model, loss, Sgd(model.parameters(), check))


def train(case, pipeline, check, stay_away):
    def inputs():
        for _ in range(COUNT):
            check("inputs")
            yield torch.randn(4, 16)

    targets = [torch.zeros(4, dtype=torch.long)] * COUNT
    pipeline.run(inputs(), targets)
    if case.where == "between" and dist.get_rank() == case.wrong:
        if case.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        stay_away()
        return
    if case.how == "stays away" and dist.get_rank() == 0:
        be_slow()
    pipeline.run(inputs(), targets)


def be_slow():
    """As on a busy machine: process 2 waits for process 0 before that one waits for process 1, and
    would have time to find a closed connection before process 0 says why."""
    time.sleep(2.0)
    first = Transport._first

    def slow(self, process, error):
        time.sleep(1.0)
        return first(self, process, error)

    Transport._first = slow


def switch_off(guard):
    if guard == "fail":
        Transport.fail = lambda self, error: None
    if guard == "_first":
        Transport._first = lambda self, process, error: (process, str(error))


def play(name, case, here):
    """Lives on, with its connections, until all others have said what stopped them."""
    switch_off(case.off)
    here.begin(case.timeout, case.store)
    check = GivesUp(case)
    pipeline = pipeline_of(case, check)
    began = time.monotonic()
    error = apart.attempt(lambda: train(case, pipeline, check, here.wait_for_others))
    told = {"error": error, "seconds": time.monotonic() - began}
    told["again"] = apart.attempt(lambda: pipeline.run([], []))
    told["saved"] = apart.attempt(pipeline.state_dict)
    here.write(told)
    here.wait_for_others()


if __name__ == "__main__":
    apart.main(CASES, play)
