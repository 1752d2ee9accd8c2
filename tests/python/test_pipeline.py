# SPDX-License-Identifier: BSD-3-Clause
"""Pipelines of one process, what they refuse, and processes that are lost. Those of several
processes: tests/python/distributed/test_pipeline_ranks.py."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from common import assert_same
from torch import nn

import optfuse
from optfuse.pipeline import Pipeline, plan

FREE = (0.0, 0.0)
loss_fn = nn.functional.cross_entropy


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 4))


def plan_of(model, strategy="1f1b", processes=1, **options):
    return plan(
        model, torch.zeros(4, 16), processes, strategy, network=FREE, costs="analytic", **options
    )


def batches(count):
    generator = torch.Generator().manual_seed(3)
    xs = [torch.randn(4, 16, generator=generator) for _ in range(count)]
    return xs, [torch.randint(4, (4,), generator=generator) for _ in range(count)]


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True, **options)


@pytest.mark.parametrize("wrap", [lambda o: o, optfuse.fuse])
@pytest.mark.parametrize("strategy", ["1f1b", "layerpipe", "gpipe"])
def test_without_delays_it_is_plain_training(strategy, wrap):
    model, plain = mlp(), mlp()
    size = 2 if strategy == "gpipe" else 1
    options = {"micro_batches": 2} if strategy == "gpipe" else {}
    made = plan_of(model, strategy, **options)
    assert not any(made.delays)
    pipeline = Pipeline(made, model, loss_fn, wrap(sgd(model)))
    stock = sgd(plain)
    xs, ys = batches(12)
    losses = pipeline.run(xs, ys)
    for i in range(0, 12, size):
        stock.zero_grad()
        for x, y in zip(xs[i : i + size], ys[i : i + size], strict=True):
            loss = loss_fn(plain(x), y)
            loss.backward()
            assert losses.pop(0) == float(loss.detach())
        stock.step()
    assert_same("weights", list(model.parameters()), list(plain.parameters()))
    assert pipeline.stash_bytes == 0


class Inside(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def three(second):
    first = nn.Linear(16, 16)
    return nn.Sequential(first, Inside(second or first), nn.Linear(16, 4))


def tied():
    """With the plan of one that isn't: plan() refuses those itself."""
    made, model = plan_of(three(nn.Linear(16, 16))), three(None)
    return made, model, sgd(model)


def delayed(model):
    return optfuse.fuse(sgd(model), delay={model: 1})


def preconditioned(model):
    optimizer = sgd(model)
    optimizer.kept = optfuse.kfac(model, optimizer)
    return optimizer


def other_width():
    return nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 32), nn.Linear(32, 4))


REFUSED = {
    "4 layers and the module 2": lambda m: (plan_of(m), m[:2], sgd(m)),
    "layer 0 .* trained elements": lambda m: (plan_of(m), other_width(), sgd(m)),
    "is also of layer 0": lambda m: tied(),
    "torch.distributed is not initialized": lambda m: (plan_of(m, processes=2), m, sgd(m)),
    "is not in this SGD": lambda m: (plan_of(m), m, sgd(m[:2])),
    "LBFGS": lambda m: (plan_of(m), m, torch.optim.LBFGS(m.parameters())),
    "backward mode": lambda m: (plan_of(m), m, optfuse.fuse(sgd(m), mode="backward")),
    "without delay=": lambda m: (plan_of(m), m, delayed(m)),
    "KFAC.remove": lambda m: (plan_of(m), m, preconditioned(m)),
    "must be an nn.Sequential": lambda m: (plan_of(m), m[0], sgd(m)),
    "must be a plan": lambda m: (3, m, sgd(m)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why):
    model = mlp()
    made, module, optimizer = REFUSED[why](model)
    with pytest.raises(optfuse.Error, match=why):
        Pipeline(made, module, loss_fn, optimizer)


def test_refused_at_run():
    model = mlp()
    xs, ys = batches(4)
    pipeline = Pipeline(plan_of(model, "gpipe", micro_batches=2), model, loss_fn, sgd(model))
    for inputs, targets, why in (
        (None, ys, "inputs=None on process 0"),
        (xs, None, "targets=None on process 0"),
        (xs, ys[:3], "give as many of each"),
        (xs[:3], ys[:3], "multiple of 2"),
        ([], [], "got 0 batches"),
        ([*xs[:3], "x"], ys, "as the input of batch 3"),
    ):
        with pytest.raises(optfuse.Error, match=why):
            pipeline.run(inputs, targets)
    assert len(pipeline.run(xs, ys)) == 4  # nothing was lost


def test_autocast_is_refused():
    model = mlp()
    xs, ys = batches(2)
    pipeline = Pipeline(plan_of(model), model, loss_fn, sgd(model))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(optfuse.Error, match="layer 0 .*without autocast"),
    ):
        pipeline.run(xs, ys)


def test_a_loss_that_fails_is_told_again():
    model = mlp()
    xs, ys = batches(4)
    pipeline = Pipeline(plan_of(model), model, lambda y, t: y, sgd(model))
    with pytest.raises(optfuse.Error, match="tensor with one element"):
        pipeline.run(xs, ys)
    with pytest.raises(optfuse.Error, match="has failed .* from a checkpoint"):
        pipeline.run(xs, ys)


def test_another_plans_state_is_refused():
    model = mlp()
    saved = Pipeline(plan_of(model), model, loss_fn, sgd(model)).state_dict()
    other = Pipeline(plan_of(model, "gpipe"), model, loss_fn, sgd(model))
    with pytest.raises(optfuse.Error, match="is of another plan"):
        other.load_state_dict(saved)


RANK = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
import optfuse
rank, store, strategy = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group(
    "gloo", f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=30)
)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 4))
costs = [(1, 1, 1, 0)] * 4
plan = optfuse.pipeline.plan(
    model, torch.zeros(4, 16), 2, strategy, network=(0, 0), costs=costs
)
seen = 0
def loss_fn(y, target):
    global seen
    seen += 1
    if seen == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(y, target)
pipeline = optfuse.pipeline.Pipeline(
    plan, model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1)
)
xs, ys = [torch.randn(4, 16)] * 12, [torch.zeros(4, dtype=torch.long)] * 12
began = time.monotonic()
try:
    pipeline.run(xs, ys)
except optfuse.Error as error:
    print(f"{time.monotonic() - began:.1f}", error)
"""


@pytest.mark.parametrize("strategy", ["1f1b", "layerpipe"])
def test_a_lost_process_is_named(tmp_path, strategy):
    """The last one is killed in the middle of a run: the other raises, and does not hang."""
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), strategy],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ,
        )
        for rank in range(2)
    ]
    began = time.monotonic()
    said, _ = ranks[0].communicate(timeout=120)
    ranks[1].wait(timeout=30)
    assert ranks[1].returncode == -signal.SIGKILL
    assert "optfuse: process 0 of the pipeline has lost process 1 in the" in said, said
    assert "start all processes again, from a checkpoint" in said
    assert time.monotonic() - began < 120
